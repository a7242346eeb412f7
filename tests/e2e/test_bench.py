"""The command `bench` as a user runs it: synthetic devices, a prompt file on toy models, and every bad input."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import cli, one_error, toy

pytestmark = pytest.mark.alone

TINY = "target=6ms draft=1ms alpha=0.8 rtt=20ms vocab=64 bandwidth=100Mbps entropy=2 token=0"
TABLE = {"vocab": 20, "order": 1, "seed": 2, "scale": 1.3}
PAIR = (
    "--target-model", toy(**TABLE, context=200), "--draft-model", toy(**TABLE, noise=0.7, noise_seed=1),
    "--target-threads", "1",
)  # fmt: skip
ISSUE_KEYS = {
    "speedup", "predicted", "ratio", "tau", "alpha", "c", "v", "r_ms", "hit_share", "target_busy", "tokens_per_pass",
    "wire_bytes_per_draft_token", "tokens_per_second", "target_only_tokens_per_second", "ttft_ms", "tpot_ms",
}  # fmt: skip


def bench(*arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON object, and what went to stderr."""
    done = cli("bench", *arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_synthetic_devices(tmp_path: Path) -> None:
    """Both concurrencies, taking turns over a slow link: what was asked for is what is measured; the plot is there."""
    plot, trace = tmp_path / "plot.svg", tmp_path / "trace.jsonl"
    report, table = bench(
        "--synthetic", TINY, "--concurrency", "1,4", "--requests", "3", "--max-tokens", "16", "--overlap", "off",
        "--gamma", "3", "--gammas", "1", "--seed", "1", "--verify", "coupled", "--plot", str(plot),
        "--trace", str(trace),
    )  # fmt: skip
    assert [result["concurrency"] for result in report["results"]] == [1, 4]
    assert report["summary"] == report["results"][1] and set(report["summary"]) >= ISSUE_KEYS
    assert {"config", "machine", "versions", "date"} <= set(report)

    alone = report["results"][0]
    assert alone["requests"] == alone["groups"] == 3
    assert alone["same_output"] == 1.0  # coupled: the seed alone decides
    assert 6 <= alone["target_step_ms"] < 20 and 1 <= alone["draft_step_ms"] < 10  # on a busy machine, too
    assert 1 < alone["tokens_per_pass"] <= alone["tau"] <= 4  # a token before the limit nothing is drafted
    assert 0.3 < alone["alpha"] <= 1 and 20 <= alone["r_ms"] < 60 and alone["hit_share"] == 0
    assert set(alone["gamma_chosen"]) <= {"0", "1", "2", "3"}
    assert alone["predicted"] == alone["predicted_in_turn"] and 0.5 < alone["ratio"] < 2
    assert [fixed["fixed"] for fixed in report["summary"]["gammas"]] == [1]
    assert report["summary"]["rows_per_pass"] > 1

    assert "speed-up" in table and "4 at a time" in table
    assert plot.read_text().startswith("<?xml")
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {line["request"] for line in lines} and all(line["emitted"] for line in lines)


def test_prompt_file(tmp_path: Path) -> None:
    """Spec-Bench lines and others, by category; a prompt that the context can't hold is left out, and that is said."""
    path = tmp_path / "question.jsonl"
    lines = [
        {"question_id": 1, "category": "qa", "turns": ["abc", "de"]},
        {"prompt": "ba", "category": "rag"},
        {"prompt": "a" * 300, "category": "long"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ("--requests", "2", "--max-tokens", "12", "--seed", "3", "--kept-tokens", "500")
    report, table = bench(str(path), *PAIR, *asked)
    assert set(report["summary"]["categories"]) == {"qa", "rag"}
    assert "1 prompts were left out" in table
    assert report["config"]["seed"] == 3
    assert report["config"]["kept_tokens"] == 0, "both modes run the same prompts: each is prefilled anew"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl: No such file"),
        (("--synthetic", "target=3"), "expected a unit"),
        (("--synthetic", "", "README.md"), "leave out README.md"),
        (("--draft", "none"), "bench compares with target-only"),
        (("--gamma", "0"), "bench compares with target-only"),
        (("--concurrency", "0"), "out of range"),
        (("--concurrency", "1,1"), "names a number twice"),
        (("--gammas", "many"), "no list of whole numbers"),
        (("--max-tokens", "1"), "has no rate"),
        (("--plot", "plot.txt"), "expected a name that ends in .svg"),
        (("--json", "nowhere/out.json"), "can't be written"),
        (("--trace", "nowhere/out.json"), "--trace nowhere/out.json"),
    ],
)
def test_bad_input_is_said_at_once(arguments: tuple[str, ...], said: str) -> None:
    """Before any worker starts: importing torch alone would take longer."""
    started = time.monotonic()
    assert said in one_error(cli("bench", *arguments, *PAIR), 2)
    assert time.monotonic() - started < 5


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    assert f"{path}:2: expected" in one_error(cli("bench", str(path), *PAIR), 2)
