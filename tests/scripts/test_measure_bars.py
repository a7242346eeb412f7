"""The table of bars: real runs on quick synthetic devices, and the numbers behind every row."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import measure_bars

QUICK = ("--synthetic", "target=6ms draft=1ms alpha=0.8 vocab=64 token=0", "--max-tokens", "12", "--requests", "1")


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(measure_bars.main, arguments)
    return done.exit_code, done.output


def test_a_row_a_bar_from_a_real_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = {"far": (*QUICK, "--gammas", "2"), "far-in-turn": (*QUICK, "--gammas", "2", "--overlap", "off")}
    monkeypatch.setattr(measure_bars, "RUNS", runs)
    status, output = invoke("--only", "far", "--seeds", "1,2", "--folder", str(tmp_path))
    assert status == 0, output
    (row,) = [line for line in output.splitlines() if line.startswith("| draft 15 ms away")]
    assert "| ≥ 1.30 |" in row and row.count(",") >= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{run}-{seed}.json" for run in runs for seed in (1, 2)]
    assert '"cores"' in output and "--seed 1`, `2" in output
    on, off = (json.loads((tmp_path / f"{run}-1.json").read_text()) for run in runs)
    ratio = measure_bars.best_speedup(on) / measure_bars.best_speedup(off)
    assert f"{ratio:.2f}" in row


def test_every_run_has_a_bar_and_every_bar_its_runs() -> None:
    assert {run for bar in measure_bars.BARS for run in bar.runs} == set(measure_bars.RUNS)


def test_a_bar_is_kept_on_its_side() -> None:
    least, most = measure_bars.BARS[0], next(bar for bar in measure_bars.BARS if bar.most is not None)
    assert least.kept(least.least) and not least.kept(least.least - 0.01)
    assert most.kept(most.most) and not most.kept(most.most + 0.01)


def test_a_run_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure_bars, "RUNS", {"bad-draft": ("--synthetic", "target=never")})
    status, output = invoke("--only", "bad", "--folder", str(tmp_path))
    assert status == 1 and "target=never" in output


def test_no_such_run(tmp_path: Path) -> None:
    status, output = invoke("--only", "nothing", "--folder", str(tmp_path))
    assert status == 2 and "single-coupled" in output
