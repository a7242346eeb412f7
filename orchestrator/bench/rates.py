"""What one batch ran at, while it ran at its concurrency.

A batch's steady window goes from the moment when all its streams have their first tokens to the end of the first of
them: neither the start nor the last stragglers count in tokens a second.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.bench.samples import Batch, Sample, Stream

LEAST_SHARE = 0.25  # of a batch's tokens in its steady window; with fewer, the whole batch counts


@dataclass(frozen=True)
class Window:
    """From `start` (what came then is not in it) to `end`; `whole`: there was no steady part worth its name."""

    start: float
    end: float
    whole: bool = False

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def samples(self, batch: Batch) -> list[Sample]:
        """The rounds that ended in it."""
        return [one for stream in batch.streams for one in stream.samples if self.start < one.at <= self.end]


@dataclass(frozen=True)
class Rates:
    """Of one batch in its window."""

    tokens_per_second: float
    target_busy: float  # share of the time in which the target computed
    rows_per_pass: float


def window(batch: Batch) -> Window:
    """The steady window of a batch, or all of it where streams end so early that little is left."""
    streams = batch.streams
    steady = Window(max(one.first for one in streams), min(one.end for one in streams))
    inside = sum(sample.emitted for sample in steady.samples(batch))
    if steady.seconds > 0 and inside >= LEAST_SHARE * sum(len(one.tokens) for one in streams):
        return steady
    end = max(one.end for one in streams)
    first = min(one.first for one in streams)
    return Window(first if first < end else min(one.started for one in streams), end, whole=True)


def rates(batch: Batch) -> Rates:
    """A pass that several rounds shared counts once: each of its `rows` brings seconds / rows of it.

    Of a pass that the window cuts only the part within it counts.
    """
    span = window(batch)
    samples = span.samples(batch)
    passes = sum(1 / one.rows for one in samples)
    return Rates(
        tokens_per_second=sum(one.emitted for one in samples) / span.seconds,
        target_busy=sum(_within(span, one) / one.rows for stream in batch.streams for one in stream.samples)
        / span.seconds,
        rows_per_pass=len(samples) / passes if passes else 0.0,
    )


def _within(span: Window, one: Sample) -> float:
    """Seconds of the round's pass that lie in the window."""
    return max(0.0, min(one.at, span.end) - max(one.at - one.verify_seconds, span.start))


def steady_samples(batches: Iterable[Batch]) -> list[Sample]:
    """The rounds in the windows of all batches."""
    return [sample for batch in batches for sample in window(batch).samples(batch)]


def ttft_ms(streams: Iterable[Stream]) -> list[float]:
    """Times to the first token."""
    return [(one.first - one.started) * 1e3 for one in streams]


def tpot_ms(streams: Iterable[Stream]) -> list[float]:
    """Times per token after the first, of the streams that have one."""
    return [(one.end - one.first) / (len(one.tokens) - 1) * 1e3 for one in streams if len(one.tokens) > 1]


def median(values: Iterable[float]) -> float:
    """0 where there are none."""
    known = list(values)
    return statistics.median(known) if known else 0.0


def p99(values: Sequence[float]) -> float:
    """0 where there are none; between ranks, linear."""
    return float(np.percentile(values, 99)) if values else 0.0
