"""How the command line, the environment and the config file become one RuntimeConfig.

Flags > SPECDEC_* > --config FILE (TOML) > defaults. The runtime's flags may stand before or after the command; after it
they win. Imports click and this package's dataclasses only: --help must be instant.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from orchestrator.config import CODECS, DTYPES, ENGINES, GRAPHS, OVERLAPS, VERIFY_MODES, WEIGHTS, RuntimeConfig
from orchestrator.request import GenerateOptions

_RUNTIME = RuntimeConfig()
_GENERATE = GenerateOptions()
RUNTIME_FIELDS = tuple(field.name for field in dataclasses.fields(RuntimeConfig))
GENERATE_FIELDS = tuple(field.name for field in dataclasses.fields(GenerateOptions))


class GammaType(click.ParamType):  # type: ignore[type-arg]
    """A number of tokens, or auto."""

    name = "auto|integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto" or isinstance(value, int):
            return "auto" if value == "auto" else int(value)
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither auto nor a number of tokens", param, ctx)


def _option(name: str, owner: object, help_text: str, **extra: Any) -> Callable[..., Any]:
    """One flag whose default, environment variable and TOML key follow from the dataclass's field."""
    field = name.removeprefix("--").replace("-", "_")
    default = getattr(owner, field)
    return click.option(
        name,
        default=default,
        show_default=default is not None,
        envvar=f"SPECDEC_{field.upper()}",
        help=help_text,
        **extra,
    )


_RUNTIME_OPTIONS = (
    _option("--target", _RUNTIME, "Where the target runs: cpu, gpu0 (or cuda:0), mps, or tcp://HOST:PORT of a worker."),
    _option(
        "--draft", _RUNTIME, "Where the draft runs: as --target; also ngram (prompt lookup) or none (plain decoding)."
    ),
    _option("--target-model", _RUNTIME, "Hugging Face id, local folder, .gguf file, or smollm2-135m-instruct."),
    _option("--draft-model", _RUNTIME, "As --target-model; also smollm2-135m-draft (ours) or ngram."),
    _option("--target-dtype", _RUNTIME, "Precision of the target.", type=click.Choice(DTYPES)),
    _option("--draft-dtype", _RUNTIME, "Precision of the draft.", type=click.Choice(DTYPES)),
    _option("--target-threads", _RUNTIME, "CPU threads of the target.", type=int),
    _option("--draft-threads", _RUNTIME, "CPU threads of the draft.", type=int),
    _option(
        "--target-engine",
        _RUNTIME,
        "What runs the target; auto: llamacpp for a .gguf file where it is installed, else torch.",
        type=click.Choice(ENGINES),
    ),
    _option("--draft-engine", _RUNTIME, "What runs the draft; as --target-engine.", type=click.Choice(ENGINES)),
    _option(
        "--weights",
        _RUNTIME,
        "packed: weights laid out anew for a CPU in float32, joined on CUDA; plain: as transformers has them.",
        type=click.Choice(WEIGHTS),
    ),
    _option(
        "--graphs",
        _RUNTIME,
        "On CUDA, both workers capture small passes as graphs and replay them; no effect on other devices.",
        type=click.Choice(GRAPHS),
    ),
    _option(
        "--gamma",
        _RUNTIME,
        "Draft tokens in a block; 0 decodes plainly; auto: as many as give the most tokens a second, 0 included.",
        type=GammaType(),
    ),
    _option("--overlap", _RUNTIME, "Draft while the target verifies, or take turns.", type=click.Choice(OVERLAPS)),
    _option("--verify", _RUNTIME, "How the target verifies a block.", type=click.Choice(VERIFY_MODES)),
    _option("--codec", _RUNTIME, "How q̃ travels when --verify is rejection.", type=click.Choice(CODECS)),
    _option("--connect-timeout", _RUNTIME, "Seconds to wait for a worker at an address.", type=float),
    _option("--draft-timeout", _RUNTIME, "Seconds to wait for a block before going on without one.", type=float),
    _option(
        "--kept-tokens",
        _RUNTIME,
        "Most tokens that a worker started here keeps of ended requests, for prompts that begin alike; 0: none.",
        type=int,
    ),
    _option("--debug", _RUNTIME, "Tracebacks and more log lines.", is_flag=True),
)

_GENERATE_OPTIONS = (
    _option("--max-tokens", _GENERATE, "Stop after this many tokens.", type=int),
    _option("--temperature", _GENERATE, "0 is greedy.", type=float),
    _option("--top-k", _GENERATE, "Keep the k likeliest tokens; 0 is off.", type=int),
    _option("--top-p", _GENERATE, "Keep the likeliest tokens up to this mass; 1 is off.", type=float),
    _option("--min-p", _GENERATE, "Keep tokens at least this fraction of the likeliest; 0 is off.", type=float),
    _option("--seed", _GENERATE, "0 to 2**64 − 1; drawn and reported where it's not given.", type=int),
)


def _read_config(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """Make a TOML file's keys the defaults of this command and of those below it."""
    if path is None:
        return None
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"--config {path}: {error}") from error
    known = (*RUNTIME_FIELDS, *GENERATE_FIELDS)
    unknown = sorted(key for key in content if key not in known)
    if unknown:
        raise click.UsageError(f"--config {path}: unknown key {', '.join(unknown)}; known are {', '.join(known)}")
    nested = sorted(key for key, value in content.items() if not isinstance(value, str | int | float | bool))
    if nested:
        raise click.UsageError(f"--config {path}: {', '.join(nested)} must be one value")
    commands = getattr(context.command, "commands", {})
    context.default_map = {**content, **{name: content for name in commands}}
    return path


_CONFIG_OPTION = click.option(
    "--config",
    envvar="SPECDEC_CONFIG",
    is_eager=True,
    callback=_read_config,
    metavar="FILE",
    help="TOML file: the flags' names with underscores as keys.",
)


def runtime_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the runtime's flags and --config to a command."""
    for option in (_CONFIG_OPTION, *reversed(_RUNTIME_OPTIONS)):
        command = option(command)
    return command


def generate_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sampling flags to a command."""
    for option in reversed(_GENERATE_OPTIONS):
        command = option(command)
    return command


def runtime_config(context: click.Context) -> RuntimeConfig:
    """The configuration of a command: its own flags, then those before it, then environment, file and defaults."""
    values = {name: context.params[name] for name in RUNTIME_FIELDS}
    parent = context.parent
    if parent is not None:
        for name in RUNTIME_FIELDS:
            here, above = context.get_parameter_source(name), parent.get_parameter_source(name)
            if here is not ParameterSource.COMMANDLINE and above is ParameterSource.COMMANDLINE:
                values[name] = parent.params[name]
    return RuntimeConfig(**values)
