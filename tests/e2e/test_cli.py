"""The command line as a user runs it: what goes to stdout and to stderr, the JSON, precedence, and every bad input."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import ORCHESTRATOR, WorkerByHand, cli, free_port, one_error, plain_coupled, toy

TABLE = {"vocab": 20, "order": 1, "seed": 2, "scale": 1.3}
TARGET = toy(**TABLE, context=200)
DRAFT = toy(**TABLE, noise=0.7, noise_seed=1)
PAIR = ("--target-model", TARGET, "--draft-model", DRAFT, "--target-threads", "1")
PLAIN = ("--target-model", TARGET, "--draft", "none", "--target-threads", "1")
REPORT = {"text", "token_ids", "finish_reason", "usage", "seed", "speculative", "seconds"}
SPECULATIVE = {
    "rounds", "drafted", "accepted", "emitted", "acceptance_rate", "tokens_per_round", "wire_bytes_per_draft_token",
    "accepted_per_position", "gammas", "branch_hits", "branch_misses",
}  # fmt: skip


def test_json_and_trace(tmp_path: Path) -> None:
    """One object with the documented keys, numbers that agree, and a trace whose lines add up to it."""
    trace = tmp_path / "trace.jsonl"
    done = cli(
        "generate", "abc", *PAIR, "--json", "--trace", str(trace), "--max-tokens", "60", "--seed", "5",
        "--verify", "coupled", "--gamma", "4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == REPORT
    assert set(report["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
    spec, seconds = report["speculative"], report["seconds"]
    assert set(spec) == SPECULATIVE and set(seconds) == {"draft", "branches", "verify", "wire", "total"}

    assert report["token_ids"] == plain_coupled(TARGET, [0, 1, 2], 5, 60)
    assert report["text"] == "".join("abcdefghijklmnopqrst"[token] for token in report["token_ids"])
    assert report["usage"] == {"prompt_tokens": 3, "completion_tokens": 60, "total_tokens": 63}
    assert report["seed"] == 5 and report["finish_reason"] == "length"
    assert spec["emitted"] == 60 and 0 < spec["accepted"] < spec["drafted"]
    assert spec["acceptance_rate"] == pytest.approx(spec["accepted"] / spec["drafted"])
    assert spec["tokens_per_round"] == pytest.approx(60 / spec["rounds"])
    assert sum(spec["accepted_per_position"]) == spec["accepted"] and len(spec["accepted_per_position"]) <= 4
    assert 1 < spec["wire_bytes_per_draft_token"] < 200
    assert all(value >= 0 for value in seconds.values())
    assert seconds["draft"] + seconds["verify"] + seconds["wire"] <= seconds["total"]

    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(lines) == spec["rounds"]
    assert [token for line in lines for token in line["emitted"]] == report["token_ids"]
    assert sum(len(line["proposed"]) for line in lines) == spec["drafted"]
    assert sum(line["accepted"] for line in lines) >= spec["accepted"]
    assert [line["round"] for line in lines] == list(range(len(lines)))
    assert lines[-1]["finish_reason"] == "length" and all(line["finish_reason"] is None for line in lines[:-1])
    assert sum(line["bytes_to_target"] for line in lines if line["proposed"]) == pytest.approx(
        spec["wire_bytes_per_draft_token"] * spec["drafted"]
    )
    assert spec["gammas"] == {str(gamma): [line["gamma"] for line in lines].count(gamma) for gamma in
                              sorted({line["gamma"] for line in lines})}  # fmt: skip
    assert max(line["gamma"] for line in lines) == 4
    asked = [line["branches"] for line in lines if line["branches"] is not None]
    assert asked and spec["branch_hits"] == sum(one["hit"] for one in asked)
    assert len(asked) - 1 <= spec["branch_hits"] + spec["branch_misses"] <= len(asked)
    for line, later in itertools.pairwise(lines):
        assert (later["origin"] == "branch") == (line["branches"] is not None and line["branches"]["hit"])
    base = 3
    for line in lines:
        assert line["base_length"] == base and {"correction", "bonus"} & set(line)
        assert line["source"] == (DRAFT if line["proposed"] else None)
        base += len(line["emitted"])


def test_stdout_is_the_text_and_stderr_the_summary() -> None:
    done = cli("generate", "abc", *PAIR, "--max-tokens", "30", "--seed", "5", "--verify", "coupled")
    text = "".join("abcdefghijklmnopqrst"[token] for token in plain_coupled(TARGET, [0, 1, 2], 5, 30))
    assert (done.returncode, done.stdout) == (0, text + "\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("30 tokens in ") and "seed 5" in line and "draft tokens accepted" in line


def test_prompt_from_stdin_and_drawn_seed() -> None:
    done = subprocess.run(
        [*ORCHESTRATOR, "generate", "-", *PLAIN, "--json", "--max-tokens", "9", "--verify", "coupled"],
        input="abc", capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["token_ids"] == plain_coupled(TARGET, [0, 1, 2], report["seed"], 9)
    assert report["speculative"]["drafted"] == 0 == report["speculative"]["acceptance_rate"]


# ---------------------------------------------------------------- precedence


def resolved(arguments: list[str], **environment: str) -> dict[str, Any]:
    """The configuration that the command line would run with, without starting anything."""
    code = (
        "import sys, json, dataclasses\n"
        "from orchestrator import generate, cli\n"
        "async def show(job):\n"
        "    print(json.dumps({**vars(job.config), **vars(job.options)}))\n"
        "    return 0\n"
        "generate.run_generate = show\n"
        "cli.main(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=60, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_precedence(tmp_path: Path) -> None:
    """Flags > SPECDEC_* > --config > defaults, for the runtime's options and for sampling; before and after."""
    config = tmp_path / "specdec.toml"
    config.write_text('gamma = 3\nmax_tokens = 33\nverify = "coupled"\ntop_p = 0.5\ntarget_model = "toy:"\n')
    by_file = resolved(["--config", str(config), "generate", "x"])
    assert (by_file["gamma"], by_file["max_tokens"], by_file["verify"]) == (3, 33, "coupled")
    assert (by_file["top_p"], by_file["target_model"], by_file["codec"]) == (0.5, "toy:", "counts")
    assert resolved(["generate", "x", "--config", str(config)]) == by_file
    assert resolved(["generate", "x"], SPECDEC_CONFIG=str(config)) == by_file

    environment = {"SPECDEC_GAMMA": "5", "SPECDEC_MAX_TOKENS": "55"}
    by_environment = resolved(["--config", str(config), "generate", "x"], **environment)
    assert (by_environment["gamma"], by_environment["max_tokens"], by_environment["verify"]) == (5, 55, "coupled")

    arguments = ["--config", str(config), "--gamma", "7", "generate", "x", "--max-tokens", "77"]
    by_flag = resolved(arguments, **environment)
    assert (by_flag["gamma"], by_flag["max_tokens"], by_flag["verify"]) == (7, 77, "coupled")
    assert resolved(["generate", "x", "--gamma", "7"], **environment)["gamma"] == 7
    assert resolved(["--gamma", "7", "generate", "x", "--gamma", "9"], **environment)["gamma"] == 9
    plain = resolved(["generate", "x"])
    assert (plain["gamma"], plain["overlap"]) == ("auto", "on")
    assert resolved(["generate", "x", "--gamma", "auto", "--overlap", "off"], **environment)["gamma"] == "auto"
    assert resolved(["generate", "x"], SPECDEC_OVERLAP="off")["overlap"] == "off"


# ---------------------------------------------------------------- bad input

BAD: dict[str, tuple[list[str], str]] = {
    "unknown device": (["generate", "x", "--target", "tpu"], "--target.*tpu.*cpu, gpu0"),
    "absent device": (["generate", "x", *PLAIN, "--target", "gpu7"], "gpu7|cuda"),
    "unknown draft place": (["generate", "x", "--draft", "nobody"], "--draft.*nobody.*ngram"),
    "bad address": (["generate", "x", "--target", "tcp://host"], "--target.*port"),
    "unknown model": (["generate", "x", *PLAIN[2:], "--target-model", "./no-such-folder"], "no-such-folder"),
    "bad toy": (["generate", "x", *PLAIN[2:], "--target-model", "toy:legs=4"], "legs"),
    "other tokenizer": (
        ["generate", "x", "--target-model", TARGET, "--draft-model", toy(vocab=20, names="permuted")],
        "another vocabulary.*--draft none",
    ),
    "long prompt": (["generate", "a" * 200, *PLAIN], "200 tokens.*shorten"),
    "empty prompt": (["generate", ""], "prompt is empty"),
    "gamma below 0": (["generate", "x", "--gamma", "-1"], "gamma.*-1.*64"),
    "absurd gamma": (["generate", "x", "--gamma", "1000"], "gamma.*1000.*64"),
    "kept tokens below 0": (["generate", "x", "--kept-tokens", "-1"], "kept-tokens -1.*0.*or more"),
    "kept tokens no number": (["generate", "x", "--kept-tokens", "some"], "kept-tokens.*some"),
    "unknown overlap": (["generate", "x", "--overlap", "maybe"], "overlap.*maybe.*on.*off"),
    "unknown graphs": (["generate", "x", "--graphs", "maybe"], "graphs.*maybe.*on.*off"),
    "gamma no number": (["generate", "x", "--gamma", "many"], "gamma.*many"),
    "negative temperature": (["generate", "x", "--temperature", "-0.5"], "temperature.*-0.5"),
    "temperature nan": (["generate", "x", "--temperature", "nan"], "temperature.*nan"),
    "top-p 0": (["generate", "x", "--top-p", "0"], "top-p.*0"),
    "min-p 1": (["generate", "x", "--min-p", "1"], "min-p.*1"),
    "top-k -1": (["generate", "x", "--top-k", "-1"], "top-k.*-1"),
    "max-tokens 0": (["generate", "x", "--max-tokens", "0"], "max-tokens.*0"),
    "seed too large": (["generate", "x", "--seed", str(2**64)], "seed.*18446744073709551616"),
    "unknown verify": (["generate", "x", "--verify", "trust"], "verify.*trust.*coupled"),
    "unknown flag": (["generate", "x", "--gama", "4"], "--gama"),
    "unknown command": (["genrate", "x"], "genrate"),
    "no prompt": (["generate"], "PROMPT"),
    "trace into nowhere": (["generate", "x", *PLAIN, "--trace", "/no/such/folder/t"], "--trace"),
    "absent config": (["--config", "/no/such/file", "generate", "x"], "--config.*no/such/file"),
    "serve": (["serve"], "not part of this version.*generate"),
    "no command": ([], "not part of this version.*generate"),
}
FAULTS: dict[str, tuple[list[str], str]] = {
    "dies while loading": (
        ["generate", "x", *PLAIN[2:], "--target-model", "toy:fail_load=2"], "target worker.*status 3",
    ),
    "draft dies while loading": (
        ["generate", "x", "--target-model", TARGET, "--draft-model", "toy:vocab=20,fail_load=2"],
        "draft worker.*status 3",
    ),
    "nobody listens": (
        ["generate", "x", "--target", f"tcp://127.0.0.1:{free_port()}", "--draft", "none", "--connect-timeout", "0.5"],
        "nobody listens.*specdec-target-worker --listen",
    ),
}  # fmt: skip


def single_line(done: subprocess.CompletedProcess[str], says: str, status: int) -> None:
    line = one_error(done, status)
    assert done.stderr.splitlines() == [line], f"more than one line: {done.stderr}"
    assert line.startswith("error: ") and re.search(says, line, re.IGNORECASE), line
    assert done.stdout == ""


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(name: str) -> None:
    arguments, says = BAD[name]
    single_line(cli(*arguments), says, 2)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_one_line_and_status_1(name: str) -> None:
    arguments, says = FAULTS[name]
    single_line(cli(*arguments), says, 1)


@pytest.mark.parametrize(
    "content, says",
    [("gama = 3", "gama.*known are.*gamma"), ("gamma = ", "config"), ("[gamma]\nx = 1", "gamma"), ("gamma = 99", "99")],
)
def test_bad_config_file(tmp_path: Path, content: str, says: str) -> None:
    config = tmp_path / "bad.toml"
    config.write_text(content)
    single_line(cli("--config", str(config), "generate", "x"), says, 2)


def test_bad_environment() -> None:
    single_line(cli("generate", "x", SPECDEC_GAMMA="lots"), "lots", 2)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--listen", "tcp://0.0.0.0:7001"], "--insecure"),
        (["--listen", "tcp://127.0.0.1:0"], "port"),
        (["--listen", "here"], "tcp://host:port"),
        (["--listen", "ipc:///no/such/folder/s"], "folder"),
        ([], "--listen"),
        (["--listen", "tcp://127.0.0.1:7001", "--threads", "0"], "threads"),
        (["--listen", "tcp://127.0.0.1:7001", "--kept-tokens", "-1"], "kept-tokens.*-1 is not in the range"),
        (["--listen", "tcp://127.0.0.1:7001", "--graphs", "maybe"], "graphs.*maybe.*on.*off"),
    ],
)
def test_bad_worker_command(role: str, arguments: list[str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"{role}_worker", "--model", "toy:", *arguments],
        capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    single_line(done, says, 2)


def test_debug_shows_the_traceback() -> None:
    done = cli("generate", "x", "--target", "tpu", "--debug")
    assert "Traceback" in done.stderr and done.returncode == 2


# ---------------------------------------------------------------- help, doctor


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["doctor", "-h"], ["--version"]])
def test_help_is_instant(arguments: list[str]) -> None:
    """Under half a second of CPU time, and without the heavy imports."""
    code = (
        "import sys\n"
        "try:\n"
        "    from orchestrator.cli import main\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'zmq', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "    sys.stderr.write(' '.join(sorted(heavy)))\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and done.stdout and done.stderr == ""
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 0.5, f"{spent:.2f} s of CPU time"


def test_doctor(by_hand: Callable[..., WorkerByHand]) -> None:
    worker = by_hand("target", TARGET, "--threads", "1")
    good = cli("doctor", "--target", worker.address, "--draft-model", DRAFT)
    assert good.returncode == 0, good.stdout + good.stderr
    assert re.search(r"devices here +cpu", good.stdout), good.stdout
    for what in ("torch", "protocol", "llama-cpp-python", "attached at", "started here", "round trip", "match"):
        assert what in good.stdout, good.stdout
    assert worker.alive
    bad = cli("doctor", "--target", worker.address, "--draft-model", toy(vocab=20, names="permuted"))
    assert bad.returncode == 1
    assert "FAILED" in bad.stdout and "another vocabulary" in bad.stdout
    assert "Traceback" not in bad.stderr
