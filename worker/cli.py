"""The command line that both workers share. Imports no torch, so that --help is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import click

from worker.config import DTYPES, ENGINES, GRAPHS, WEIGHTS, Role, WorkerConfig
from worker.process import Served, run_worker


class OneLineCommand(click.Command):
    """A command whose usage errors are one line like all others, where click would print its usage above them."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except click.ClickException as error:
            click.echo(f"error: {' '.join(error.format_message().split())}", err=True)
            sys.exit(error.exit_code)
        sys.exit(status)


def worker_command(
    role: Role, default_model: str, model_help: str, load: Callable[[WorkerConfig], Served]
) -> click.Command:
    """The click command of one role; `load` brings the engine, after the address is bound."""
    other = "verifies them" if role == "target" else "proposes blocks of draft tokens"

    @click.command(
        cls=OneLineCommand, name=f"specdec-{role}-worker", help=f"A {role} worker: {other} for a specdec-orchestrator."
    )
    @click.option("--model", default=default_model, show_default=True, help=model_help)
    @click.option("--device", default="cpu", show_default=True, help="cpu, gpu0 (or cuda:0), mps.")
    @click.option("--dtype", default="float32", show_default=True, type=click.Choice(DTYPES))
    @click.option(
        "--listen",
        required=True,
        metavar="ADDRESS",
        help="tcp://HOST:PORT (control at PORT+1), ipc://PATH. A host beyond this machine needs --insecure.",
    )
    @click.option("--threads", type=click.IntRange(1, 1024), default=os.cpu_count() or 1, show_default=True)
    @click.option(
        "--engine",
        default="auto",
        show_default=True,
        type=click.Choice(ENGINES),
        help="What runs the model; auto: llamacpp for a .gguf file where it is installed, else torch.",
    )
    @click.option(
        "--weights",
        default="packed",
        show_default=True,
        type=click.Choice(WEIGHTS),
        help="packed: weights are laid out anew for a CPU in float32, joined on CUDA; plain: they stay as they are.",
    )
    @click.option(
        "--graphs",
        default="on",
        show_default=True,
        type=click.Choice(GRAPHS),
        help="On CUDA, capture small passes as graphs and replay them; has no effect on other devices.",
    )
    @click.option(
        "--kept-tokens",
        type=click.IntRange(min=0),
        default=WorkerConfig.kept_tokens,
        show_default=True,
        help="Most tokens kept of ended requests, for prompts that begin alike; 0 runs every prompt in whole.",
    )
    @click.option("--insecure", is_flag=True, help="Allow a non-loopback --listen: anyone who reaches it can use it.")
    @click.option("--exit-with-stdin", is_flag=True, help="End when standard input closes (set by a supervisor).")
    @click.option("--debug", is_flag=True, help="Tracebacks and more log lines.")
    @click.version_option(package_name="specdec-orchestrator")
    def command(**options: Any) -> None:
        config = WorkerConfig(role, **options)
        sys.exit(run_worker(config, load))

    return command
