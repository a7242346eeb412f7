"""What is llama.cpp's alone: cells that grow, few rows, failures of its own, and which files it is given."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from execution import default_models, load
from execution.errors import ModelError, NoFreeRow
from execution.interface import Extension
from tests.tiny_gguf import EOS, VOCAB, needs_llamacpp, tiny_network, write_gguf

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def tiny(tmp_path):
    """(file, network): a context long enough to fill the first pool of cells."""
    network = tiny_network(1, context=4096)
    return write_gguf(tmp_path / "tiny.gguf", network), network


def plain(network, tokens):
    with torch.no_grad():
        return network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def error(*args, **kwargs) -> str:
    with pytest.raises(ModelError) as caught:
        load(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@needs_llamacpp
def test_cells_grow_and_keep_what_rows_share(tiny, some_tokens):
    path, network = tiny
    executor, _ = load(str(path), engine="llamacpp")
    text, other = some_tokens(1500, 1), some_tokens(1400, 2)
    row = executor.open()
    executor.extend([Extension(row, text, 0)])
    fork = executor.fork(row, 1200)  # shares its cells
    stranger = executor.open()
    first = executor._context.cells
    executor.extend([Extension(stranger, other, 0)])  # does not fit beside the first
    assert executor._context.cells == 2 * first
    more = some_tokens(3, 3)
    found = executor.extend([Extension(one, more, 3) for one in (row, fork, stranger)])
    for logits, held in zip(found, (text, text[:1200], other), strict=True):
        torch.testing.assert_close(logits, plain(network, held + more)[-3:], **CLOSE)


@needs_llamacpp
def test_a_batch_larger_than_one_decode(tiny, some_tokens):
    """1,300 tokens of three rows go in three pieces; asked positions lie in all of them."""
    path, network = tiny
    executor, _ = load(str(path), engine="llamacpp")
    texts = [some_tokens(count, count) for count in (700, 5, 595)]
    rows = [executor.open() for _ in texts]
    found = executor.extend([Extension(row, text, len(text)) for row, text in zip(rows, texts, strict=True)])
    for logits, text in zip(found, texts, strict=True):
        torch.testing.assert_close(logits, plain(network, text), **CLOSE)


@needs_llamacpp
def test_rows_run_out(tiny):
    executor, _ = load(str(tiny[0]), engine="llamacpp")
    rows = [executor.open() for _ in range(executor.free_rows)]
    assert executor.free_rows == 0
    for ask in (executor.open, lambda: executor.fork(rows[0], 0)):
        with pytest.raises(NoFreeRow, match="all 256 rows are in use"):
            ask()
    executor.close(rows[7])
    assert executor.free_rows == 1
    executor.extend([Extension(executor.open(), [1, 2], 1)])


@needs_llamacpp
def test_a_failed_decode_leaves_rows_as_they_were(tiny, some_tokens, monkeypatch):
    """The second of its pieces fails; the first is taken back."""
    path, network = tiny
    executor, _ = load(str(path), engine="llamacpp")
    held, lost = some_tokens(40, 1), some_tokens(800, 2)
    row, calls = executor.open(), []
    executor.extend([Extension(row, held, 0)])
    import llama_cpp

    decode = llama_cpp.llama_decode

    def failing(context, batch):
        calls.append(batch.n_tokens)
        return decode(context, batch) if len(calls) == 1 else -3

    monkeypatch.setattr(llama_cpp, "llama_decode", failing)
    with pytest.raises(RuntimeError, match="failed with status -3"):
        executor.extend([Extension(row, lost, 1)])
    monkeypatch.undo()
    assert len(calls) == 2 and executor.length(row) == 40
    [logits] = executor.extend([Extension(row, [3, 4], 2)])
    torch.testing.assert_close(logits, plain(network, [*held, 3, 4])[-2:], **CLOSE)


@needs_llamacpp
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keys_and_values(tiny, some_tokens, dtype):
    path, network = tiny
    executor, _ = load(str(path), engine="llamacpp", dtype=dtype)
    assert executor.dtype == dtype
    text = some_tokens(60, 1)
    [logits] = executor.extend([Extension(executor.open(), text, 60)])
    expected = plain(network, text)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.05 * float(expected.abs().max()))


@needs_llamacpp
def test_a_gguf_file_is_run_as_it_is_and_that_is_said(tiny, caplog):
    caplog.set_level(logging.INFO, "execution")
    executor, words = load(str(tiny[0]))
    assert type(executor).__name__ == "LlamaCppExecutor" and (executor.device, executor.vocab_size) == ("cpu", VOCAB)
    assert executor.context_length == 4096 and words.eos_ids == (EOS,) and words.size == VOCAB
    assert "tiny.gguf: llama.cpp runs it (llama-cpp-python" in caplog.text


def test_without_llamacpp_torch_runs_it_and_that_is_said(tiny, caplog, monkeypatch, cache):
    monkeypatch.setattr("execution.loading.find_spec", lambda name: None)
    caplog.set_level(logging.INFO, "execution")
    executor, _ = load(str(tiny[0]))
    assert type(executor).__name__ == "TransformersExecutor"
    assert "tiny.gguf: torch runs it, dequantised; pip install 'specdec-orchestrator[llamacpp]'" in caplog.text
    assert "engine llamacpp is not installed: pip install" in error(str(tiny[0]), engine="llamacpp")


def test_both_engines_find_the_same_vocabulary(tiny, cache):
    _, torchs = load(str(tiny[0]), engine="torch")
    from execution.gguf_models import converted_vocabulary, vocabulary_folder

    assert converted_vocabulary(vocabulary_folder(tiny[0], "tiny", VOCAB)) == torchs


@needs_llamacpp
def test_what_it_cannot_run(tmp_path, model_folder, monkeypatch):
    for model in ("toy:vocab=8", str(model_folder), default_models.DRAFT, str(tmp_path / "none.gguf")):
        assert "is no .gguf file" in error(model, engine="llamacpp")
    (tmp_path / "a.gguf").write_bytes(b"not one")
    assert "is not a GGUF file" in error(str(tmp_path / "a.gguf"), engine="llamacpp")
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + b"\0" * 200)
    assert "llama.cpp cannot load b.gguf" in error(str(tmp_path / "b.gguf"), engine="llamacpp")
    monkeypatch.setattr("execution.llamacpp_context.can_use_gpu", lambda: False)
    path = write_gguf(tmp_path / "tiny.gguf", tiny_network(1))
    for device in ("gpu0", "mps"):
        assert "built for a CPU alone" in error(str(path), engine="llamacpp", device=device)
    assert "device 'tpu' is unknown" in error(str(path), engine="llamacpp", device="tpu")


@needs_llamacpp
@pytest.mark.slow
def test_the_default_target_by_its_name():
    """Q4_1, as the file has it: near the dequantised one, which torch runs."""
    try:
        executor, words = load(default_models.TARGET, engine="llamacpp", threads=os.cpu_count() or 1)
    except ModelError as problem:
        if "could not be fetched" in str(problem):
            pytest.skip(str(problem))
        raise
    from tokenizers import Tokenizer

    text = Tokenizer.from_buffer(words.tokenizer_json).encode("The capital of France is").ids
    [logits] = executor.extend([Extension(executor.open(), text, 1)])
    assert Tokenizer.from_buffer(words.tokenizer_json).decode([int(logits[0].argmax())]) == " Paris"
