"""Passes with shapes out of few: when they are recorded, replayed and given up, and what a recorded pass may do.

The graphs here are stand-ins that run a pass again; that its logits are right in every life of rows is in test_rows.py
and test_row_cache.py, which run with them too. Capture itself needs CUDA: scripts/gpu_check.py.
"""

from __future__ import annotations

import logging
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from execution import static_passes
from execution.attention_kinds import changing_rotary
from execution.cuda_graphs import CudaGraphs, RunAgain
from execution.interface import Extension
from execution.static_passes import bucket
from execution.transformers_executor import TransformersExecutor

VOCAB = 61
WIDE = 1e-5  # of the largest logit: float32, sums over other lengths

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA: nothing to capture on")


class Noted(RunAgain):
    """Graphs of which is known how often each was replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.replays: list[int] = []
        self.forgotten = 0

    def record(self, run):
        graph, index = super().record(run), len(self.replays)
        self.replays.append(0)
        replay = graph.replay

        def counted():
            self.replays[index] += 1
            replay()

        graph.replay = counted
        return graph

    def forget(self) -> None:
        self.forgotten += 1


class Refusing(RunAgain):
    """Graphs that can't be: as CUDA does, the end of the capture fails after what made it fail."""

    def record(self, run):
        self.recorded += 1
        try:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        finally:
            raise RuntimeError("capture is invalid")


def close(ours, expected):
    assert ours.shape == expected.shape
    assert float((ours - expected).abs().max()) <= WIDE * max(1.0, float(expected.abs().max()))


def test_buckets():
    assert [bucket(count) for count in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert all(bucket(bucket(count)) == bucket(count) >= count > bucket(count) / 2 for count in range(1, 5000))


def test_attended_columns():
    found = [static_passes.columns(length) for length in (1, 256, 257, 1025, 2049, 4096, 4097, 100_000)]
    assert found == [256, 256, 512, 1280, 2560, 4096, 5120, 114_688]
    for length in range(1, 9000):
        assert length <= static_passes.columns(length) < max(length + 256, 1.25 * length + 1)


def test_run_then_recorded_then_replayed(make_pair):
    graphs = Noted()
    pair = make_pair(graphs=graphs, packed=False)
    row, held, seen = pair.executor.open(), [], []
    for token in range(15):  # within one length of 16 columns
        held.append(token)
        [logits] = pair.executor.extend([Extension(row, [token], 1)])
        close(logits, pair.plain(held)[-1:])
        seen.append(graphs.recorded)
    assert seen == [0] + [1] * 14 and graphs.replays == [14]
    pair.executor.extend([Extension(row, [1, 2], 0)])  # another shape
    assert (graphs.recorded, graphs.replays) == (1, [14])


def test_replays_are_the_same_bits_and_their_logits_are_the_callers(make_pair):
    """A graph writes its output to one place: what an earlier pass gave must not change with it."""
    pair = make_pair(graphs=Noted())
    row = pair.executor.open()
    pair.executor.extend([Extension(row, [1, 2, 3], 0)])
    found, blocks = [], [[5], [6], [5], [6], [5], [7], [5]]
    for block in blocks:
        found += pair.executor.extend([Extension(row, block, 1)])
        pair.executor.truncate(row, 3)
    assert not torch.equal(found[0], found[1])
    for block, logits in zip(blocks, found, strict=True):
        assert torch.equal(logits, found[blocks.index(block)])
        close(logits, pair.plain([1, 2, 3, *block])[-1:])


def test_verify_and_draft_shapes_take_turns_with_rows_of_unequal_length(make_pair, some_tokens):
    graphs = Noted()
    pair, rng = make_pair(graphs=graphs), random.Random(3)
    texts = {pair.executor.open(): some_tokens(count, count) for count in (3, 11, 6)}
    pair.executor.extend([Extension(row, text, 0) for row, text in texts.items()])
    for step in range(24):
        width = (5, 1)[step % 2]
        batch = [Extension(row, some_tokens(rng.randint(1, width), step + row), 1) for row in texts]
        for extension, logits in zip(batch, pair.executor.extend(batch), strict=True):
            close(logits, pair.plain(texts[extension.row] + extension.tokens)[-1:])
            keep = rng.randint(0, len(extension.tokens)) if len(texts[extension.row]) < 60 else 0
            texts[extension.row] += extension.tokens[:keep]
            pair.executor.truncate(extension.row, len(texts[extension.row]))
    assert sum(graphs.replays) > 2 * graphs.recorded > 0


def test_a_large_pass_is_left_alone(make_pair, some_tokens, monkeypatch):
    graphs = Noted()
    pair = make_pair(graphs=graphs)
    monkeypatch.setattr("execution.static_passes.MOST_POSITIONS", 64)
    text = some_tokens(65, 1)
    for _ in range(3):
        row = pair.executor.open()
        [logits] = pair.executor.extend([Extension(row, text, 1)])
        close(logits, pair.plain(text)[-1:])
        pair.executor.close(row)
    assert graphs.recorded == 0
    rows = [pair.executor.open() for _ in range(5)]
    for _ in range(3):  # 5 rows of 13: 16 each when padded
        pair.executor.extend([Extension(row, text[:13], 1) for row in rows])
        for row in rows:
            pair.executor.truncate(row, 0)
    assert graphs.recorded == 0


def test_graphs_are_dropped_when_the_storage_moves(make_pair, monkeypatch):
    monkeypatch.setattr("execution.row_cache._FIRST_COLUMNS", 16)
    graphs = Noted()
    pair = make_pair(graphs=graphs)
    row, text = pair.executor.open(), [1, 2, 3]
    pair.executor.extend([Extension(row, text, 0)])

    def step() -> None:
        [logits] = pair.executor.extend([Extension(row, [9], 1)])
        close(logits, pair.plain([*text, 9])[-1:])
        pair.executor.truncate(row, 3)

    for _ in range(3):
        step()
    dropped = graphs.forgotten
    assert (graphs.replays, pair.executor._cache.generation) == ([2], 0)
    other = pair.executor.open()  # a second slot: the storage is a new one
    assert pair.executor._cache.generation == 1
    step()
    assert graphs.forgotten == dropped + 1 and graphs.replays == [2, 1]  # recorded anew
    pair.executor.extend([Extension(other, list(range(20)), 1)])  # more columns
    step()
    step()
    assert graphs.forgotten == dropped + 2 and graphs.replays == [2, 1, 2]


def test_the_least_recently_used_shape_goes_first(make_pair, monkeypatch):
    monkeypatch.setattr("execution.static_passes.MOST_GRAPHS", 2)
    graphs = Noted()
    pair = make_pair(graphs=graphs, packed=False)
    row = pair.executor.open()

    def twice(width: int) -> None:
        for _ in range(2):
            pair.executor.extend([Extension(row, [1] * width, 1)])
            pair.executor.truncate(row, 0)

    twice(1), twice(2)
    assert graphs.replays == [1, 1]
    twice(1)
    assert graphs.replays == [3, 1]
    twice(3)  # in place of width 2
    twice(1)
    assert graphs.replays == [5, 1, 1]
    twice(2)
    assert graphs.replays == [5, 1, 1, 2] and len(pair.executor._static._held) == 2


def test_what_cannot_be_captured_is_said_once_and_runs_eagerly(make_pair, some_tokens, caplog):
    graphs = Refusing()
    pair = make_pair(graphs=graphs)
    texts = {pair.executor.open(): some_tokens(4, seed) for seed in (1, 2)}
    pair.executor.extend([Extension(row, text, 0) for row, text in texts.items()])
    for step in range(6):
        for width in (1, 3):
            batch = [Extension(row, some_tokens(width, step + row), width) for row in texts]
            for extension, logits in zip(batch, pair.executor.extend(batch), strict=True):
                texts[extension.row] += extension.tokens
                close(logits, pair.plain(texts[extension.row])[-width:])
    [record] = caplog.records
    assert record.levelno == logging.WARNING and graphs.recorded == 1
    text = record.getMessage()
    assert "\n" not in text and "'tiny llama'" in text and "not permitted when stream is capturing" in text


def test_an_error_of_the_pass_itself_is_not_hidden(make_pair, monkeypatch):
    pair = make_pair(graphs=Noted())
    row = pair.executor.open()
    pair.executor.extend([Extension(row, [1], 1)])

    def fails(*_, **__):
        raise RuntimeError("the test's own")

    monkeypatch.setattr(pair.executor._network, "forward", fails)
    with pytest.raises(RuntimeError, match="the test's own"):
        pair.executor.extend([Extension(row, [1], 1)])
    assert pair.executor.length(row) == 1


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_changing_rotary_base_is_never_recorded(kind, make_config, caplog):
    from transformers import AutoModelForCausalLM

    config = make_config("llama")
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 40}
    config.rope_parameters = rope | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    assert changing_rotary(config) == kind
    caplog.set_level(logging.INFO)
    graphs = RunAgain()
    executor = TransformersExecutor(AutoModelForCausalLM.from_config(config), "m", vocab_size=VOCAB, graphs=graphs)
    row = executor.open()
    for token in range(5):
        executor.extend([Extension(row, [token], 1)])
    [record] = [record for record in caplog.records if record.name.startswith("execution")]
    assert record.levelno == logging.INFO and kind in record.getMessage() and graphs.recorded == 0


class NothingForTheHost(TorchDispatchMode):
    """Fails where a pass on CUDA would wait for the device, or bring host data there: capture allows neither."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.called = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.called += 1
        assert name not in self.FORBIDDEN, f"{name} in a recorded pass"
        if name == "lift_fresh":  # a single number goes to a kernel as its argument
            assert args[0].dim() == 0, "host data in a recorded pass"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a mask as an index"
        return function(*args, **(kwargs or {}))


def test_a_recorded_pass_never_waits_for_the_device(family, make_pair, some_tokens):
    class Watched(Noted):
        called = 0

        def record(self, run):
            def watched():
                with NothingForTheHost() as watch:
                    found = run()
                self.called += watch.called
                return found

            return super().record(watched)

    graphs = Watched()
    pair = make_pair(family, graphs=graphs, packed=False)
    rows = [pair.executor.open() for _ in range(2)]
    for logits in (1, 1, 0, 0):
        batch = [Extension(row, some_tokens(3 + index, row), logits) for index, row in enumerate(rows)]
        pair.executor.extend(batch)
        for row in rows:
            pair.executor.truncate(row, 1)
    assert graphs.recorded >= 1 and graphs.called > 50


def test_the_watch_sees_a_pass_that_waits(make_pair):
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NothingForTheHost():
        torch.ones(1).item()
    with pytest.raises(AssertionError, match="a mask as an index"), NothingForTheHost():
        torch.ones(3)[torch.ones(3, dtype=torch.bool)]
    with pytest.raises(AssertionError, match="host data"), NothingForTheHost():
        torch.tensor([1, 2])


def test_nothing_but_buffers_tells_one_pass_of_a_shape_from_another(family, make_pair, some_tokens):
    """A graph knows only what is on the device: the network's other inputs are those of the first time."""
    given = []

    class Keeping(Noted):
        def record(self, run):
            def kept():
                found = run()
                place = pair.executor._cache.placement
                given.append((place, place.starts, place.length, pair.executor._cache.layers[0].get_seq_length()))
                return found

            return super().record(kept)

    pair = make_pair(family, graphs=Keeping())
    row, held = pair.executor.open(), some_tokens(2, 1)
    pair.executor.extend([Extension(row, held, 0)])
    for token in some_tokens(8, 2):
        held.append(token)
        close(pair.executor.extend([Extension(row, [token], 1)])[0], pair.plain(held)[-1:])
    assert len(given) > 4 and all(one == given[0] for one in given)


@needs_cuda
def test_captured_graphs_give_the_logits_of_eager_passes(make_config, some_tokens):
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda:0")
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(make_config("llama")).to(device)
    found = []
    for graphs in (None, CudaGraphs(device)):
        executor = TransformersExecutor(network, "tiny", vocab_size=VOCAB, graphs=graphs)
        row = executor.open()
        found.append(torch.cat([executor.extend([Extension(row, some_tokens(3, i), 3)])[0] for i in range(20)]))
        assert executor._static is None or (executor._static._held and not executor._static._failed)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
