"""Two test processes at once (pytest-xdist, a file at a time): which file comes when, and tests that run alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import pytest

# flock on a folder and on this file: they are there, need no clean-up, and end with the process that holds them.
DOOR, ROOM = Path(__file__).parent, Path(__file__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, so that both processes end together; those that run alone last, as one waits then."""
    items.sort(key=lambda item: (_alone(item), item.get_closest_marker("slow") is None))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the timeout too: a wait for others is not the test's time
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test marked `alone` runs while no other does; who waits for that holds the door, and nobody starts anew."""
    room = os.open(ROOM, os.O_RDONLY)
    try:
        door = os.open(DOOR, os.O_RDONLY)
        try:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX if _alone(item) else fcntl.LOCK_SH)
        finally:
            os.close(door)
        return (yield)
    finally:
        os.close(room)


def _alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None
