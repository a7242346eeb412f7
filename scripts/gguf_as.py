"""Write a GGUF file again with every tensor dequantised: the same weights for engines that are compared.

    python scripts/gguf_as.py model.Q4_1.gguf model.F32.gguf --type F32
    python scripts/gguf_as.py smollm2-135m-instruct smollm2.F16.gguf --type F16

All else in the file (architecture, tokenizer, chat template) is kept. F16 rounds; F32 is exactly what the quantised
weights stand for.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize
from rich.console import Console
from rich.progress import track

from execution import default_models
from execution.errors import ModelError
from execution.gguf_models import check_gguf

TYPES = {"F32": (np.float32, LlamaFileType.ALL_F32), "F16": (np.float16, LlamaFileType.MOSTLY_F16)}
OWN = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")  # the writer's, or ours


def copy_fields(reader: GGUFReader, writer: GGUFWriter) -> None:
    """Every key and value but those that follow from the tensors' type."""
    for field in reader.fields.values():
        if not field.name.startswith(OWN):
            kind, *inner = field.types
            writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)


def write_as(source: Path, target: Path, kind: str) -> None:
    """Write `source` to `target` with tensors of more than one dimension as `kind`, others (norms) as float32."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"]
    assert architecture.types == [GGUFValueType.STRING]
    writer = GGUFWriter(target, architecture.contents())
    dtype, file_type = TYPES[kind]
    writer.add_file_type(file_type)
    copy_fields(reader, writer)
    console = Console(stderr=True)
    for tensor in track(reader.tensors, "dequantising", console=console, disable=not sys.stderr.isatty()):
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(dtype if len(tensor.shape) > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@click.command()
@click.argument("source")
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--type", "kind", required=True, type=click.Choice(list(TYPES)))
def main(source: str, target: Path, kind: str) -> None:
    """SOURCE is a GGUF file or smollm2-135m-instruct; TARGET must not exist yet."""
    if target.exists():
        raise click.UsageError(f"{target} exists: remove it, or name another file")
    try:
        path = default_models.target_file() if source == default_models.TARGET else Path(source)
        if not path.is_file():
            raise click.UsageError(f"{source}: there is no such file; give a .gguf file or {default_models.TARGET}")
        check_gguf(path, source)
    except ModelError as error:
        raise click.ClickException(str(error)) from error
    part = target.with_name(target.name + ".part")
    try:
        write_as(path, part, kind)
        part.rename(target)
    except OSError as error:
        raise click.ClickException(f"{target} cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    click.echo(f"{target}: {target.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
