"""A worker process started here: spawned, watched, ended. Knows processes, not messages.

The worker's standard input is a pipe that we hold: when we end, however that is, it ends too.
"""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import sys
import termios
from collections.abc import Sequence

from orchestrator.errors import SpecdecError, UsageError, WorkerFault

TERM_SECONDS = 3.0  # exit ladder: shutdown message, then SIGTERM, then SIGKILL
STDERR_LINES = 40


class WorkerProcess:
    """One supervised worker. `role` names it in errors."""

    def __init__(self, role: str, process: asyncio.subprocess.Process, stderr: asyncio.StreamReader) -> None:
        self.role = role
        self._process = process
        self._lines: collections.deque[str] = collections.deque(maxlen=STDERR_LINES)
        self._relay = asyncio.create_task(self._read_stderr(stderr), name=f"{role}-stderr")
        self.exited: asyncio.Task[int] = asyncio.create_task(process.wait(), name=f"{role}-watch")

    @classmethod
    async def spawn(cls, role: str, arguments: Sequence[str], threads: int) -> WorkerProcess:
        """Start `python -m {role}_worker` with `arguments`, its math libraries limited to `threads`."""
        terminal = _terminal_like_ours() if sys.stderr.isatty() else None
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"{role}_worker",
            "--exit-with-stdin",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=terminal[1] if terminal else asyncio.subprocess.PIPE,
            env=dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads)),
        )
        if terminal is None:
            assert process.stderr is not None
            return cls(role, process, process.stderr)
        os.close(terminal[1])
        return cls(role, process, await _reader(terminal[0]))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _read_stderr(self, stream: asyncio.StreamReader) -> None:
        """Keep the last lines; pass everything but the final `error: ` line on, as it comes."""
        pending = b""
        while data := await _read_some(stream):
            pending += data.replace(b"\r\n", b"\n")  # a terminal's line ends
            *lines, pending = pending.split(b"\n")
            for line in lines:
                self._take_line(line.decode("utf-8", "replace"))
            if pending and not b"error: ".startswith(pending[:7]):
                self._pass_on(pending.decode("utf-8", "replace"))  # a progress bar redraws one unfinished line
                pending = b""
        if pending:
            self._take_line(pending.decode("utf-8", "replace"))

    def _take_line(self, line: str) -> None:
        self._lines.append(line)
        if not line.startswith("error: "):
            self._pass_on(line + "\n")

    @staticmethod
    def _pass_on(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    async def death(self) -> SpecdecError:
        """Wait for the process to end and say how it did: who died, with which status, and its own last words."""
        status = await self.exited
        await self._relay
        said = next((line.removeprefix("error: ") for line in reversed(self._lines) if line.startswith("error: ")), "")
        if status == 2 and said:
            return UsageError(f"the {self.role} worker can't start: {said}")
        how = f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"
        return WorkerFault(f"the {self.role} worker (pid {self.pid}) {how}{': ' + said if said else ''}")

    async def stop(self) -> None:
        """The rest of the exit ladder, after the shutdown message: wait, SIGTERM, wait, SIGKILL."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None and not self.exited.done():
                self._process.send_signal(number)
            await asyncio.wait([self.exited], timeout=TERM_SECONDS)
            if self.exited.done():
                break
        await self._relay

    def kill(self) -> None:
        """SIGKILL now (a start that was interrupted)."""
        if not self.exited.done():
            self._process.kill()


def _terminal_like_ours() -> tuple[int, int]:
    """A pseudo-terminal of our size, (our end, the worker's end): pip and others draw their bars only on one."""
    ours, theirs = os.openpty()
    columns, lines = os.get_terminal_size(sys.stderr.fileno())
    termios.tcsetwinsize(theirs, (lines, columns))
    return ours, theirs


async def _reader(descriptor: int) -> asyncio.StreamReader:
    stream = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    return stream


async def _read_some(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.read(4096)
    except OSError:  # how a pseudo-terminal says that the other end is closed
        return b""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
