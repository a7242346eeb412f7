"""The second turn's wait, on devices whose prefill takes a known time for each token."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import measure_turns

pytestmark = pytest.mark.alone

TARGET = "synthetic:step_ms=2,token_ms=0.5,vocab=64"  # 1,000 tokens take half a second
DRAFT = "synthetic:step_ms=1,token_ms=0.1,vocab=64,alpha=0.8"
QUICK = ("--target-model", TARGET, "--draft-model", DRAFT, "--pairs", "2")


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(measure_turns.main, arguments)
    return done.exit_code, done.output


def test_a_second_turn_waits_for_what_is_new() -> None:
    status, output = invoke(*QUICK)
    assert status == 0, output
    rows = [line for line in output.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(rows) == 2
    for row in rows:
        tokens, cold, second, ratio = (float(cell) for cell in row.strip("| ").split("|"))
        assert 1000 < tokens < 1400 and cold >= 0.5 * (tokens - 1)
        assert ratio == pytest.approx(second / cold, abs=0.01)
    assert re.search(r"≤ 0.25 \| 0\.\d+ \| yes", output), output


def test_without_kept_rows_it_waits_for_all_of_it() -> None:
    """So the ratio measures reuse and nothing else."""
    status, output = invoke(*QUICK, "--kept-tokens", "0")
    assert status == 0, output
    found = re.search(r"≤ 0.25 \| (\d\.\d+) \| \*\*no\*\*", output)
    assert found and float(found[1]) > 0.8, output


def test_a_model_that_is_not_there() -> None:
    status, output = invoke("--target-model", "./no-such-folder")
    assert status == 1 and "no-such-folder" in output
