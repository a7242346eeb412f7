"""What the orchestrator tells its user when something is wrong: one line, with what to do."""

from __future__ import annotations


class SpecdecError(Exception):
    """Base of all errors that a user of the Runtime sees; `exit_status` is that of the command line."""

    exit_status = 1


class UsageError(SpecdecError, ValueError):
    """The request or the configuration asks for something that can't be; nothing is broken."""

    exit_status = 2


class WorkerFault(SpecdecError):
    """A worker died, can't be reached, or answered wrongly; the text names it."""
