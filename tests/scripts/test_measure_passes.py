"""The measurement of passes: its tables, its bars and its comparison on a real network, and what it refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import measure_passes

from execution import Extension, load
from tests.tiny_gguf import needs_llamacpp

pytestmark = pytest.mark.alone


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(measure_passes.main, arguments)
    return done.exit_code, done.output


def test_the_shipped_draft_is_measured(monkeypatch):
    monkeypatch.setattr(measure_passes, "CONTEXTS", (128, 300))
    status, output = invoke("--model", "smollm2-135m-draft", "--runs", "2", "--threads", "1")
    assert status == 0, output
    rows = dict(re.findall(r"^\| (packed|plain) \| ([\d. |]+) \|$", output, re.MULTILINE))
    assert all(len(row.split(" | ")) == len(measure_passes.POSITIONS) + 1 for row in rows.values()) and len(rows) == 2
    times = [float(part) for part in rows["packed"].split(" | ")]
    assert times[-1] == pytest.approx(times[3] / times[0], abs=0.05)  # v(4)
    assert re.search(r"\| one position / floor \| ≤ 2.00 \| [\d.]+ \| (yes|\*\*no\*\*) \|", output)
    differs = re.search(r"16 prompts: logits differ by ([\d.e+-]+) at most, of ([\d.]+)\.", output)
    assert differs is not None and float(differs[1]) <= 1e-4 * float(differs[2]) and float(differs[2]) > 1


def test_a_wrong_logit_shows():
    right, _ = load("toy")
    texts = [[token % right.vocab_size for token in range(20)]]

    class Wrong:
        def __getattr__(self, name):
            return getattr(right, name)

        def extend(self, batch: list[Extension]) -> list[torch.Tensor]:
            found = [part.clone() for part in right.extend(batch)]
            for part in found[:1]:
                part[-1:, 3] += 0.5
            return found

    assert measure_passes.largest_difference(right, right, texts)[0] == 0
    assert measure_passes.largest_difference(Wrong(), right, texts)[0] == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(("arguments", "says"), [
    (("--model", "toy"), "no network"),
    (("--model", "nowhere/at-all.gguf"), "nowhere/at-all.gguf"),
    pytest.param(
        ("--engine", "llamacpp", "--model", "smollm2-135m-draft"), "no .gguf file", marks=needs_llamacpp
    ),
])  # fmt: skip
def test_what_it_refuses(arguments, says):
    status, output = invoke(*arguments)
    assert status != 0 and says in output
