"""The timeline on a trace that a toy pair wrote."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.e2e.support import cli, toy

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import draw_timeline

TABLE = {"vocab": 14, "order": 2, "seed": 8, "scale": 1.4}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With overlap on and off, and one without a draft."""
    folder = tmp_path_factory.mktemp("traces")
    places = {}
    for name, flags in {"on": ["--overlap", "on"], "off": ["--overlap", "off"], "plain": ["--draft", "none"]}.items():
        places[name] = str(folder / f"{name}.jsonl")
        models = ["--target-model", toy(**TABLE, delay_ms=8), "--draft-model", toy(**TABLE, noise=0.3, noise_seed=3)]
        asked = ["--max-tokens", "60", "--gamma", "3", "--seed", "2", "--trace", places[name]]
        done = cli(*flags, *models, "generate", "a", *asked)
        assert done.returncode == 0, done.stderr
    return places


def draw(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(draw_timeline.main, arguments)
    return done.exit_code, done.output


def test_one_panel_a_trace(traces: dict[str, str], tmp_path: Path) -> None:
    picture = tmp_path / "timeline.svg"
    status, output = draw(traces["on"], traces["off"], "--out", str(picture))
    assert status == 0, output
    text = picture.read_text()
    assert text.count("one round of") == 2 and "draft tokens:" in text and "between" in text
    again = tmp_path / "again.svg"
    assert draw(traces["on"], traces["off"], "--out", str(again))[0] == 0 and again.read_text() == text


def test_parts_of_a_round_add_up(traces: dict[str, str]) -> None:
    """Each trip lies in its round or starts there, and no worker computed longer than its trip took."""
    for name in ("on", "off"):
        for lines in draw_timeline.read_trace(traces[name]):
            for line in lines:
                start, end = line["spans"]["round"]
                for _, _, left, right, computed in draw_timeline.bars(line):
                    assert start <= left <= end and computed <= (right - left) * 1e3 + 1e-6


def test_a_round_of_the_median_time_is_shown(traces: dict[str, str]) -> None:
    lines, place = draw_timeline.typical(draw_timeline.read_trace(traces["off"]))
    times = sorted(draw_timeline.milliseconds(line) for line in lines if line["proposed"])
    assert times[len(times) // 4] <= draw_timeline.milliseconds(lines[place]) <= times[-len(times) // 4]


@pytest.mark.parametrize("what", ["plain", "no trace", "nothing"])
def test_what_is_no_trace_is_refused(traces: dict[str, str], tmp_path: Path, what: str) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"a": 1}\n' if what == "no trace" else "")
    status, output = draw(traces["plain"] if what == "plain" else str(other), "--out", str(tmp_path / "x.svg"))
    assert status == 2 and ("--trace" in output or "with a draft" in output)
