"""`specdec-orchestrator`: the command line. Everything heavy is imported inside a command."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import click

from orchestrator.bench.options import bench_options
from orchestrator.errors import SpecdecError
from orchestrator.options import GENERATE_FIELDS, generate_options, runtime_config, runtime_options
from orchestrator.request import GenerateOptions


class OneLineGroup(click.Group):
    """A group whose usage errors are one line like all others, where click would print its usage above them."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx is not None else "specdec-orchestrator"
            _end(f"{error.format_message().rstrip('.')}; `{path} --help` lists what there is", error.exit_code)
        except click.ClickException as error:
            _end(error.format_message(), error.exit_code)
        except click.Abort:
            _end("interrupted", 130)
        sys.exit(status)


@click.group(
    cls=OneLineGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Lossless speculative decoding with the draft and the target in two processes, on two devices or hosts.",
)
@runtime_options
@click.version_option(package_name="specdec-orchestrator")
@click.pass_context
def main(context: click.Context, /, **_flags: Any) -> None:
    if context.invoked_subcommand is None:
        context.invoke(serve)


@main.command(help="Serve an OpenAI-compatible API (the default command).")
def serve() -> None:
    _end("the HTTP server is not part of this version: use `specdec-orchestrator generate PROMPT`", 2)


@main.command(help="Generate text from PROMPT (- reads it from standard input).")
@click.argument("prompt")
@generate_options
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write one JSON line a round to this file.")
@runtime_options
@click.pass_context
def generate(
    context: click.Context, /, prompt: str, raw: bool, as_json: bool, trace: str | None, **_flags: Any
) -> None:
    from orchestrator.generate import GenerateJob, run_generate

    if prompt == "-":
        prompt = sys.stdin.read()

    def job() -> Coroutine[Any, Any, int]:
        options = GenerateOptions(**{name: context.params[name] for name in GENERATE_FIELDS})
        return run_generate(GenerateJob(runtime_config(context), options, prompt, raw, as_json, trace))

    _run(context, job)


@main.command(
    help="Measure speculative against target-only decoding, interleaved in the same processes, on PROMPT_FILEs: "
    'Spec-Bench questions (their first turns), {"prompt": …} lines, or, without a file, the prompts that ship with it.'
)
@click.argument("prompt_files", nargs=-1, metavar="[PROMPT_FILE]...")
@bench_options
@runtime_options
@click.pass_context
def bench(context: click.Context, /, prompt_files: tuple[str, ...], **flags: Any) -> None:
    from orchestrator.bench.command import BenchJob, run_bench

    names = ("concurrency", "requests", "synthetic", "gammas", "json_file", "plot_file", "trace_file")

    def job() -> Coroutine[Any, Any, int]:
        options = GenerateOptions(**{name: context.params[name] for name in GENERATE_FIELDS})
        own = {name: flags[name] for name in names}
        return run_bench(BenchJob(runtime_config(context), options, prompt_files, **own))

    _run(context, job)


@main.command(help="Check versions, devices, both workers' handshake, round trips and tokenizers.")
@runtime_options
@click.pass_context
def doctor(context: click.Context, /, **_flags: Any) -> None:
    from orchestrator.doctor import run_doctor

    _run(context, lambda: run_doctor(runtime_config(context)))


def _run(context: click.Context, job: Callable[[], Coroutine[Any, Any, int]]) -> None:
    """Run a command's coroutine; one clear line and the right status where it fails."""
    debug = bool(context.params["debug"]) or bool(context.parent and context.parent.params["debug"])
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        status = asyncio.run(_until_terminated(job()))
    except SpecdecError as error:
        if debug:
            logging.exception("the command failed")
        _end(str(error), error.exit_status)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except asyncio.CancelledError:
        _end("terminated", 143)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone: nobody to tell
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        _end(f"unexpected {type(error).__name__}: {error}; run again with --debug for the traceback", 1)
    else:
        sys.exit(status)


async def _until_terminated(job: Coroutine[Any, Any, int]) -> int:
    """Run `job`; a SIGTERM cancels it, so that workers are ended and folders removed as after ^C."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await job


def _end(text: str, status: int) -> None:
    click.echo(f"error: {' '.join(text.split())}", err=True)
    sys.exit(status)
