"""Every command and program of the README, and every command of the pages, runs.

The two that set things up are run by .ci/run, from the README itself.

Toy models stand in for the models, and this machine's CPU for GPUs: what is tested is that flags, files and names exist
and do what the page says.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.support import WorkerByHand, toy

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TARGET, DRAFT = toy(vocab=40, seed=1), toy(vocab=40, seed=1, noise=0.5, noise_seed=2)
STAND_INS = {
    "Qwen/Qwen2.5-7B-Instruct": TARGET,
    "Qwen/Qwen2.5-0.5B-Instruct": DRAFT,
    "qwen2.5-0.5b-instruct-q8_0.gguf": DRAFT,
    "gpu0": "cpu",
    "gpu1": "cpu",
}
SHORTENED = {  # the last of two flags counts
    "scripts/measure_turns.py": ("--target-model", TARGET, "--draft-model", DRAFT, "--history", "100", "--pairs", "1"),
    "scripts/measure_bars.py": ("--only", "wide-coupled", "--seeds", "1"),
    "scripts/gpu_check.py": ("--small", "--device", "cpu"),
    "scripts/measure_passes.py": ("--model", "smollm2-135m-draft", "--engine", "torch", "--runs", "1"),
    "scripts/bench_peers.py": ("--prompts", "1", "--max-tokens", "4", "--rounds", "1"),
    "bench": ("--requests", "1", "--max-tokens", "24"),
}
ENVIRONMENT = {"SPECDEC_TARGET_MODEL": TARGET, "SPECDEC_DRAFT_MODEL": DRAFT, "SPECDEC_MAX_TOKENS": "8"}


def blocks(language: str, *, marked: bool, page: str = README) -> list[str]:
    """A page's code blocks in one language; `marked`: those that CI runs."""
    found = re.findall(rf"(<!-- ci: \w+ -->\n)?```{language}\n(.*?)```", page, re.DOTALL)
    return [text for mark, text in found if bool(mark) is marked]


def commands(page: str = README) -> list[list[str]]:
    """One list of words a command, comments and line continuations read as a shell does."""
    text = "\n".join(blocks("sh", marked=False, page=page)).replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def stood_in(words: list[str]) -> list[str]:
    return [str(ROOT / word) if word.startswith("scripts/") else STAND_INS.get(word, word) for word in words]


def runnable(words: list[str]) -> list[str]:
    """A page's command, shortened."""
    module = [] if words[0] == "python" else ["-m", "orchestrator"]
    return [sys.executable, *module, *stood_in([*words[1:], *SHORTENED.get(words[1], ())])]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    synthetic = any(word == "--synthetic" or word.endswith("measure_bars.py") for word in words)
    environment = {} if synthetic else ENVIRONMENT  # synthetic devices are their own stand-ins
    return subprocess.run(
        words, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_ci_runs_the_marked_commands() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    marks = re.findall(r"<!-- ci: (\w+) -->", README)
    assert marks == ["main", "test"]
    assert all(f"$(readme {mark})" in script for mark in marks)
    assert len(blocks("sh", marked=True)) == len(marks)


@pytest.mark.parametrize(
    "words", [words for words in commands() if words[0] == "specdec-orchestrator" and "tcp" not in " ".join(words)]
)
def test_orchestrator_commands(words: list[str], tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "orchestrator", *stood_in(words)[1:]], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "--trace" in words:
        assert (tmp_path / words[words.index("--trace") + 1]).stat().st_size > 0


def started(words: list[str], by_hand: Callable[..., WorkerByHand]) -> dict[str, str]:
    """Run a page's worker command at a free port: where it says that it listens, and where it does."""
    flags = dict(zip(words[1::2], stood_in(words)[2::2], strict=True))
    model, address = flags.pop("--model"), flags.pop("--listen")
    return {address: by_hand("draft", model, *(part for flag in flags.items() for part in flag)).address}


def test_a_draft_elsewhere(tmp_path: Path, by_hand: Callable[..., WorkerByHand]) -> None:
    (worker,) = [words for words in commands() if words[0] == "specdec-draft-worker"]
    (client,) = [words for words in commands() if "--draft" in words and "tcp" in " ".join(words)]
    places = started(worker, by_hand)
    assert set(places) < set(client)
    done = run([places.get(word, word) for word in runnable(client)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "draft tokens accepted" in done.stderr


def test_scripts(tmp_path: Path) -> None:
    for words in commands():
        if words[0] == "python":
            done = run(runnable(words), tmp_path)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", sorted(path.stem for path in (ROOT / "docs").glob("*.md")))
def test_commands_of_a_page(page: str, tmp_path: Path, by_hand: Callable[..., WorkerByHand]) -> None:
    """One after another in one folder: a later one reads what an earlier one wrote, or asks the worker it started."""
    places: dict[str, str] = {}
    for words in commands((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")):
        if words[0] == "specdec-draft-worker":
            places |= started(words, by_hand)
            continue
        done = run([places.get(word, word) for word in runnable(words)], tmp_path)
        assert done.returncode == 0, (words, done.stderr)


def test_every_command_is_run_by_a_test() -> None:
    """A command of another kind would be run by nothing."""
    assert {words[0] for words in commands()} <= {"specdec-orchestrator", "specdec-draft-worker", "python"}


@pytest.mark.parametrize("program", blocks("python", marked=False))
def test_programs(program: str, tmp_path: Path) -> None:
    program = program.replace("Runtime(gamma", f'Runtime(target_model="{TARGET}", draft_model="{DRAFT}", gamma', 1)
    done = run([sys.executable, "-c", program], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
