"""The two ways in which this tool says no: the caller's mistake (exit 2) and the world's (exit 1)."""

from __future__ import annotations


class UsageFault(Exception):
    """The arguments cannot work as given; one line that says what, why and what to do."""


class RunFault(Exception):
    """The arguments are fine but something outside failed; one line that says what, why and what to do."""
