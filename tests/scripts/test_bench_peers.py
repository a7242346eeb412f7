"""The comparison with peers: real runs on tiny models and on the default pair, and the arithmetic of its tables."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import bench_peers  # noqa: E402
from bench_peers import (  # noqa: E402
    ASSISTED,
    BARS,
    GENERATE,
    LLAMA,
    OURS,
    OURS_LLAMA,
    OURS_LLAMA_PLAIN,
    OURS_PLAIN,
    Contestant,
    Run,
    differences,
    measure,
    rates,
    ratio,
    read_draft,
    tables,
)

from tests.tiny_gguf import needs_llamacpp, tiny_network, write_gguf  # noqa: E402

ALWAYS = [GENERATE, ASSISTED, OURS, OURS_PLAIN]
WITH_LLAMA = [*ALWAYS, LLAMA, bench_peers.LOOKUP, OURS_LLAMA, OURS_LLAMA_PLAIN]


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(bench_peers.main, arguments)
    return done.exit_code, done.output


def run_script(folder: Path, *arguments: str, **environment: str) -> tuple[str, dict[str, Any]]:
    """What a real run prints, and its JSON."""
    command = [sys.executable, str(ROOT / "scripts/bench_peers.py"), *arguments, "--json", str(folder / "found.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env={**os.environ, **environment}, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "answers" not in done.stderr, "progress is for terminals"
    return done.stdout, json.loads((folder / "found.json").read_text())


def rows(output: str) -> list[str]:
    return [line.split(" | ")[0].removeprefix("| ") for line in output.splitlines() if " of " in line]


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("pair")
    files = [write_gguf(folder / f"{seed}.gguf", tiny_network(seed, context=512)) for seed in (1, 2)]
    return ("--target-model", str(files[0]), "--draft-model", str(files[1]))


def test_all_contestants_say_what_transformers_says(tiny_pair: tuple[str, ...], tmp_path: Path) -> None:
    installed = importlib.util.find_spec("llama_cpp") is not None
    small = ("--prompts", "2", "--max-tokens", "8", "--rounds", "2", "--threads", "1")
    output, found = run_script(
        tmp_path, *tiny_pair, "--gguf", tiny_pair[1], *small, SPECDEC_CACHE=str(tmp_path / "cache")
    )
    assert rows(output) == (WITH_LLAMA if installed else ALWAYS)
    assert all("2 of 2" in line for line in output.splitlines() if " of " in line), output
    for name, one in found["contestants"].items():
        assert one["first_difference"] == [None, None], name
        assert [len(each) for each in one["rounds"]] == [2, 2]
    assert all(1 <= len(run["ids"]) <= 8 for each in found["contestants"][GENERATE]["rounds"] for run in each)
    assert [bar["value"] is not None for bar in found["bars"]] == [True, True, True, installed, False]
    assert '"cores"' in output and "--max-tokens 8" in output and found["machine"]["cpu"]


@pytest.mark.slow
def test_the_default_pair_says_the_same_assisted_or_not(tmp_path: Path) -> None:
    output, found = run_script(
        tmp_path, "--only", "assisted", "--prompts", "1", "--max-tokens", "8", "--rounds", "1", "--threads", "1"
    )
    assert rows(output) == [GENERATE, ASSISTED, OURS]
    assert len(found["contestants"][GENERATE]["rounds"][0][0]["ids"]) == 8
    assert all(one["first_difference"] == [None] for one in found["contestants"].values())


@pytest.mark.slow
def test_the_assistant_is_our_draft_at_the_full_width() -> None:
    from execution.loading import read_network

    network, head_ids, _ = read_network("smollm2-135m-draft", torch.device("cpu"), torch.float32)
    prompt = torch.tensor([[1, 4093, 198, 42]])
    with torch.no_grad():
        reduced, full = network(prompt).logits, read_draft("smollm2-135m-draft")(prompt).logits
    assert full.shape == (1, 4, 49152)
    assert torch.equal(full[..., head_ids], reduced)
    others = torch.ones(49152, dtype=torch.bool).index_fill(0, head_ids, False)
    assert bool(torch.isneginf(full[..., others]).all()) and int(others.sum()) > 0


# ---------------------------------------------------------------- arithmetic


def made_up(ids: tuple[int, ...], *rounds: tuple[float, ...]) -> list[list[Run]]:
    return [[Run(ids, seconds) for seconds in each] for each in rounds]


def test_rates_are_of_a_round_and_ratios_of_one_round() -> None:
    slow, fast = (
        made_up((1, 2), (1.0, 3.0), (2.0, 2.0), (8.0, 8.0)),
        made_up((1, 2), (1.0, 1.0), (0.5, 0.5), (4.0, 4.0)),
    )
    assert rates(slow) == [1.0, 1.0, 0.25] and rates(fast) == [2.0, 4.0, 0.5]
    assert ratio(fast, slow) == 2.0  # of 2, 4 and 2; the medians' ratio would be 2 too, and of means 2.9
    assert ratio(made_up((1,), (1.0,), (4.0,), (9.0,)), made_up((1,), (2.0,), (4.0,), (3.0,))) == 1.0


def test_where_ids_first_differ() -> None:
    expected = [[Run((1, 2, 3), 1.0), Run((4, 5), 1.0)]] * 2
    found = [[Run((1, 2, 3), 1.0), Run((4, 5, 6), 1.0)], [Run((1, 9, 3), 1.0), Run((4,), 1.0)]]
    assert differences(expected, expected) == [None, None]
    assert differences(found, expected) == [1, 1]


def test_tables_from_made_up_seconds() -> None:
    ids = (1, 2, 3, 4)
    seconds = {
        GENERATE: 4.0, ASSISTED: 4.0, OURS: 2.0, OURS_PLAIN: 2.2, LLAMA: 1.0, OURS_LLAMA: 1.0, OURS_LLAMA_PLAIN: 1.1,
    }  # fmt: skip
    runs = {name: made_up(ids, (each,), (each,)) for name, each in seconds.items()}
    runs[ASSISTED] = made_up((1, 2, 9, 4), (4.0,), (4.0,))
    lines = tables(runs, "F32").splitlines()
    assert f"| {OURS} | float32 | 2.0 | 2.0–2.0 | 2.00 | 1.00 | 1 of 1 |" in lines
    assert f"| {ASSISTED} | float32 | 1.0 | 1.0–1.0 | 1.00 | 2.00 | 0 of 1 |" in lines
    assert f"| {LLAMA} | F32 | 4.0 | 4.0–4.0 | 4.00 | 0.50 | 1 of 1 |" in lines
    kept = [line.rsplit(" | ", 2)[1:] for line in lines[-len(BARS) :]]
    assert kept[:4] == [["2.00", "yes |"], ["2.00", "yes |"], ["1.10", "**no** |"], ["4.00", "yes |"]]
    assert kept[4] == ["–", "not measured |"]  # made for F16
    assert tables(runs, "F16").splitlines()[-1].endswith("| ≥ 0.93 | 0.91 | **no** |")
    assert "Q4_1 (others)" in tables(runs, "Q4_1")
    assert "not measured" in tables({GENERATE: runs[GENERATE], OURS: runs[OURS]}, "").splitlines()[-4]


class Listed(Contestant):
    """Only notes its turns."""

    turns: list[str]

    async def generate(self, prompt: list[int], max_tokens: int) -> Run:
        self.turns.append(self.name)
        return Run(tuple(prompt), 1.0)


def test_the_order_alternates_and_a_first_answer_is_not_counted() -> None:
    turns: list[str] = []
    contestants = [Listed(name, None) for name in "abc"]  # type: ignore[arg-type]
    for one in contestants:
        one.turns = turns
    runs = asyncio.run(measure(contestants, [[1], [2]], 2, 4))
    assert "".join(turns[3:]) == "abccbacbaabc"
    assert sorted(turns[:3]) == ["a", "b", "c"] and len(turns) == 15
    assert all(runs[name] == [[Run((1,), 1.0), Run((2,), 1.0)]] * 2 for name in "abc")


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prompts", "0"), "--prompts"),
        (("--prompts", "19"), "1<=x<=18"),
        (("--rounds", "0"), "--rounds"),
        (("--gguf", "no-such.gguf"), "no-such.gguf"),
        (("--target-model", "toy:vocab=64"), "--target-model toy:vocab=64: peers can't run it"),
        (("--target-model", "synthetic:step_ms=1"), "name a network"),
        (("--draft-model", "ngram"), "--draft-model ngram"),
        (("--json", "no-such-folder/found.json"), "no-such-folder"),
    ],
)
def test_a_bad_option_is_named(arguments: tuple[str, ...], says: str) -> None:
    status, output = invoke(*arguments)
    assert status == 2 and says in output.splitlines()[-1], output


@needs_llamacpp
def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "not.gguf").write_bytes(b"something else, long enough to be looked at")
    status, output = invoke("--gguf", str(tmp_path / "not.gguf"))
    assert status == 2 and "not.gguf can't be read" in output.splitlines()[-1], output


def test_a_target_that_is_not_there() -> None:
    status, output = invoke("--target-model", "./no-such-folder")
    assert status == 1 and "no-such-folder" in output.splitlines()[-1], output


def test_no_such_contestant(tiny_pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    status, output = invoke(*tiny_pair, "--only", "vllm")
    assert status == 2 and "--only vllm" in output and ASSISTED in output, output


def test_without_llama_cpp_its_rows_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as find_spec sees a package that is not there
    monkeypatch.setattr(bench_peers, "find_spec", lambda name: None)
    assert bench_peers.find_gguf(None, bench_peers.DEFAULTS.target_model) == (None, "")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "llama.cpp is left out" in captured.err and "pip install" in captured.err
    setting = bench_peers.Setting("smollm2-135m-instruct", "smollm2-135m-draft", None, "", 1, 8, 1, 64, (2,))
    assert [one.name for one in bench_peers.make_contestants(setting, None, ())] == ALWAYS


@needs_llamacpp
def test_with_llama_cpp_a_file_has_its_kind(tiny_pair: tuple[str, ...]) -> None:
    assert bench_peers.find_gguf(Path(tiny_pair[1]), tiny_pair[1]) == (Path(tiny_pair[1]), "F32")
    assert bench_peers.find_gguf(None, tiny_pair[1]) == (None, "")
