"""The check of a GPU, run on a CPU with tiny networks: that it runs, and that it fails for what it is there to find."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import gpu_check
from gpu import exactness, models, timing
from gpu.timing import CASES, Case, Timed

from execution.cuda_graphs import RunAgain

SMALL = ("--small", "--device", "cpu")


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(gpu_check.main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the times."""
    monkeypatch.setattr(timing, "measure", lambda networks, read, rate, advance: [])
    monkeypatch.setattr(exactness, "PHASES", 4)


def test_all_of_it_on_tiny_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("execution.transformers_executor.layout", lambda device, dtype: "joined")  # as on CUDA
    status, output = invoke(*SMALL)
    assert status == 0, output
    exact = [line for line in output.splitlines() if line.endswith("| yes |")]
    assert len(exact) == 2 + 3 * 3 and "**no**" not in output
    assert sum("replayed" in line for line in exact) == 5
    times = [line for line in output.splitlines() if line.startswith(("| target: ", "| draft: "))]
    assert len(times) == len(CASES) and "8 requests × 5 positions" in output
    for line in times:
        on, off, floor = (float(cell) for cell in line.split("|")[3:6])
        assert on > floor and off > floor
    assert "\x1b" not in output, "progress is for a terminal"


class Wrong(RunAgain):
    """Graphs whose second replay is another one's: what stale buffers would give."""

    def record(self, run):
        graph = super().record(run)
        replay = graph.replay
        replays = []

        def wrong():
            replay()
            replays.append(0)
            if len(replays) > 1 and graph.output is not None:
                graph.output.copy_(graph.output.flip(-1))

        graph.replay = wrong
        return graph


class Refused(RunAgain):
    def record(self, run):
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("broken, says", [(Wrong, "**no**"), (Refused, "Warned: ")])
def test_what_is_not_exact_or_not_captured_fails(
    broken: type[RunAgain], says: str, brief: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "RunAgain", broken)
    status, output = invoke(*SMALL)
    assert status == 1 and says in output, output
    if broken is Wrong:
        assert sum(line.endswith("| **no** |") for line in output.splitlines()) >= 8, output


def test_a_bar_that_is_missed(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, missed = Timed(Case("target", 5, 128, bar=1.3), 1.3, 9.0, 1.0), Timed(Case("draft", 1, 128, bar=2), 2.1, 9, 1)
    free = Timed(Case("target", 9, 128), 99.0, 99.0, 1.0)
    assert (kept.kept, missed.kept, free.kept) == (True, False, None)
    assert "| ≤ 1.3 | yes |" in timing.table([kept]) and "| ≤ 2 | **no** |" in timing.table([missed])
    monkeypatch.setattr(gpu_check, "checked_device", lambda name, small: torch.device("cpu"))
    for found, status in (([kept, free], 0), ([kept, missed], 1)):
        monkeypatch.setattr(gpu_check, "check", lambda device, small, advance, found=found: ([], found))
        assert invoke("--device", "gpu0")[0] == status


def test_the_bars_are_those_of_a_verify_pass_and_a_draft_step() -> None:
    bars = [(case.model, case.positions, case.context, case.bar) for case in CASES if case.bar]
    assert bars == [("target", 5, 128, 1.3), ("draft", 1, 128, 2.0)]


def test_real_sizes() -> None:
    assert (models.parameters(models.TARGET), models.parameters(models.DRAFT)) == (8_030_261_248, 1_235_814_400)


def test_bytes_of_a_pass_leave_an_embedding_out_that_is_no_head() -> None:
    for shape, tied in ((models.SMALL_TARGET, False), (models.SMALL_DRAFT, True)):
        network = models.build(shape, torch.bfloat16, torch.device("cpu"), 0)
        every = sum(2 * weight.numel() for weight in network.parameters())
        embedding = 2 * shape["vocab_size"] * shape["hidden_size"]
        assert models.weight_bytes(network) == every - (0 if tied else embedding)


def error(*arguments: str) -> str:
    status, output = invoke(*arguments)
    lines = output.splitlines()
    assert status == 1 and len(lines) == 1, output
    return lines[0]


def test_a_device_that_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert "gpu0' is not on this machine" in error()
    assert "gpu99' is not on this machine" in error("--device", "gpu99", "--small")
    assert "add --small" in error("--device", "cpu")
    monkeypatch.setattr(gpu_check, "parse_device", lambda name: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 << 30, 24 << 30))
    assert "has 12.0 GiB of memory free, and this needs 25.3" in error("--device", "gpu0")
