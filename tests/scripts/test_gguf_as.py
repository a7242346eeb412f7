"""A GGUF file written again: the weights that the quantised file stands for, and all else as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import gguf_as


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    path = tmp_path / "q8.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(77)
    writer.add_file_type(7)
    writer.add_token_list(["a", "b"])
    values = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    kind = GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.arange(64, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(gguf_as.main, arguments)
    return done.exit_code, done.output


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_same_weights_same_fields(kind: str, quantised: Path, tmp_path: Path) -> None:
    target = tmp_path / "whole.gguf"
    status, output = invoke(str(quantised), str(target), "--type", kind)
    assert status == 0, output
    before, after = GGUFReader(quantised), GGUFReader(target)
    expected = dequantize(before.tensors[0].data, before.tensors[0].tensor_type)
    found = {tensor.name: tensor for tensor in after.tensors}
    assert found["token_embd.weight"].tensor_type.name == kind
    np.testing.assert_array_equal(found["token_embd.weight"].data, expected.astype(f"float{kind[1:]}"))
    assert found["output_norm.weight"].tensor_type.name == "F32"
    assert after.fields["llama.context_length"].contents() == 77
    assert after.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert after.fields["general.file_type"].contents() == {"F32": 0, "F16": 1}[kind]
    assert not list(tmp_path.glob("*.part"))


def test_what_it_refuses(quantised: Path, tmp_path: Path) -> None:
    target = tmp_path / "new.gguf"
    for source, words in ((tmp_path / "none.gguf", "no such file"), (Path(__file__), "not a GGUF file")):
        status, output = invoke(str(source), str(target), "--type", "F32")
        assert status and words in output and not target.exists()
    status, output = invoke(str(quantised), str(quantised), "--type", "F32")
    assert status == 2 and "exists" in output
