"""How a worker process lives: bind, load, serve, end. The same for both roles.

Bad input ends in one line `error: …` on stderr and status 2, a fault in one line and status 1; tracebacks only with
--debug. The supervising orchestrator reads that line.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from protocol.endpoint import Endpoint
from protocol.errors import AddressError, AddressInUse
from protocol.limits import PROTOCOL_VERSION
from protocol.messages import TokenizerReply, Welcome
from worker.config import WorkerConfig
from worker.loop import Engine, WorkerLoop

EXIT_GRACE_SECONDS = 3.0  # after the parent is gone, how long a pass in flight may still take


class WorkerError(Exception):
    """One clear line for the user. `usage`: the command line asked for something that can't be (status 2)."""

    def __init__(self, text: str, *, usage: bool = False) -> None:
        super().__init__(text)
        self.usage = usage


@dataclass(frozen=True)
class Served:
    """What a role brings: the engine, how it introduces itself, and its tokenizer."""

    engine: Engine
    model: str
    source: str  # "model" or "ngram"
    vocab_size: int
    vocabulary: str  # fingerprint, "" where ids mean nothing to it (ngram)
    context_length: int
    eos_ids: tuple[int, ...]
    verify_modes: tuple[str, ...]
    codecs: tuple[str, ...]
    tokenizer: TokenizerReply


def run_worker(config: WorkerConfig, load: Callable[[WorkerConfig], Served]) -> int:
    """Run one worker until it's told to stop; returns the exit status."""
    logging.basicConfig(
        level=logging.INFO if config.debug else logging.WARNING,
        format=f"%(asctime)s {config.role}-worker %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("execution").setLevel(logging.INFO)  # what takes long at a start, and which engine runs a file
    try:
        with Endpoint(config.listen, insecure=config.insecure) as endpoint:
            _watch_signals(config, endpoint)
            if config.exit_with_stdin:
                _end_with_stdin(endpoint)
            served = load(config)
            loop = WorkerLoop(endpoint, _welcome(config, served), served.tokenizer, served.engine)
            gc.collect()
            gc.freeze()  # what is loaded stays: looking through it again cost 1 ms a run of branches, on average
            loop.run()
        return 0
    except AddressInUse as error:
        return _report(error, 1, config.debug)
    except AddressError as error:
        return _report(error, 2, config.debug)
    except WorkerError as error:
        return _report(error, 2 if error.usage else 1, config.debug)
    except Exception as error:
        return _report(error, 1, config.debug)
    finally:
        if config.exit_with_stdin and config.listen.startswith("ipc://"):  # the supervisor may be gone: tidy its folder
            with contextlib.suppress(OSError):  # not empty, or removed already
                os.rmdir(os.path.dirname(config.listen.removeprefix("ipc://")))


def _report(error: Exception, status: int, debug: bool) -> int:
    if debug:
        logging.exception("the worker ends")
    text = str(error) if type(error).__module__ != "builtins" else f"{type(error).__name__}: {error}"
    sys.stderr.write(f"error: {' '.join(text.split())}\n")
    return status


def _welcome(config: WorkerConfig, served: Served) -> Welcome:
    return Welcome(
        protocol_version=PROTOCOL_VERSION,
        role=config.role,
        instance=secrets.token_hex(8),
        pid=os.getpid(),
        package_version=version("specdec-orchestrator"),
        model=served.model,
        source=served.source,
        vocab_size=served.vocab_size,
        vocabulary=served.vocabulary,
        context_length=served.context_length,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        verify_modes=served.verify_modes,
        codecs=served.codecs,
        eos_ids=served.eos_ids,
    )


def _watch_signals(config: WorkerConfig, endpoint: Endpoint) -> None:
    signal.signal(signal.SIGTERM, lambda *_: endpoint.stop())
    # ^C reaches the whole process group: under a supervisor it's the supervisor that decides when we end.
    ignore = config.exit_with_stdin
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignore else lambda *_: endpoint.stop())


def _end_with_stdin(endpoint: Endpoint) -> None:
    """End when the parent does, whichever way it ends: its end of our stdin closes with it."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        endpoint.stop()
        threading.Event().wait(EXIT_GRACE_SECONDS)  # a long pass or a load may be running: don't outlive the parent
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
