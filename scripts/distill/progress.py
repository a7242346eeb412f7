"""Progress on stderr: a bar where that is a terminal, a plain line now and then where it is not."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Reporter:
    """One phase's progress. `update` may be called at every step; `say` always prints its line."""

    def __init__(self, title: str, every: float = 15.0) -> None:
        self.title, self.every, self.said = title, every, 0.0
        console = Console(stderr=True)
        text = TextColumn("{task.fields[text]}")
        columns = (TextColumn("{task.description}"), BarColumn(), text, TimeElapsedColumn())
        self.bar = Progress(*columns, console=console) if console.is_terminal else None
        self.task = self.bar.add_task(title, total=1.0, text="") if self.bar else None

    def __enter__(self) -> Reporter:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def update(self, share: float, text: str) -> None:
        """`share` of the phase is done, 0 to 1."""
        now = time.monotonic()
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=share, text=text)
        elif now - self.said >= self.every:
            self.said = now
            self.say(f"{100 * share:.1f} % {text}")

    def say(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {self.title}: {text}"
        if self.bar:
            self.bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)
