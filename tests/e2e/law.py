"""The statistic of the law tests, and its power. numpy and scipy only: nothing of the code under test.

Transitions (context → next token) are pooled over requests. Given how often a context was visited, its row of counts is
multinomial under the target's law (a Markov chain's transitions), so the likelihood ratio G = 2 Σ O ln(O/E) over cells
with E >= 5 (smaller ones of a row are merged) is chi-square with Σ rows (cells − 1) degrees of freedom. A token that
the law excludes gives p = 0. SIGNIFICANCE is 1e-6 with fixed seeds: what passes once, passes always.

Power: against a law in which every row has PLANTED = 0.01 of mass moved from its likeliest token to its least likely
one, G is non-central chi-square with non-centrality λ = Σ rows n_row · 2·KL(true ‖ planted), for n_row visits. `needed`
gives the number of transitions with which the planted bias is found with probability POWER = .99. How many depends on
which tokens the mass moves between: λ a transition is about .01² (1/p_from + 1/p_to). Between the two likeliest tokens
the same 1 % takes some 190,000 transitions where the least likely one takes 12,000; both are tested.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

SIGNIFICANCE = 1e-6
POWER = 0.99
PLANTED = 0.01
MIN_EXPECTED = 5.0
Floats = np.ndarray


@dataclass(frozen=True)
class Verdict:
    """The statistic, its degrees of freedom and the p-value."""

    g: float
    df: int
    p: float
    samples: int

    @property
    def rejected(self) -> bool:
        return self.p < SIGNIFICANCE

    def __str__(self) -> str:
        return f"G = {self.g:.1f} with {self.df} degrees of freedom, p = {self.p:.2g}, {self.samples} transitions"


def sampled_law(
    logits: Floats, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Floats:
    """Temperature, top-k, top-p, min-p by their definitions, one row after another: logits [C, V] -> float64 [C, V]."""
    law = np.zeros_like(logits, dtype=np.float64)
    for row, scores in enumerate(np.asarray(logits, dtype=np.float64)):
        if temperature == 0:
            law[row, int(np.argmax(scores))] = 1.0
            continue
        scaled = scores / temperature
        p = np.exp(scaled - scaled.max())
        p /= p.sum()
        if top_k:
            p[np.argsort(-p, kind="stable")[top_k:]] = 0
            p /= p.sum()
        if top_p < 1:  # the shortest run of the likeliest tokens that reaches top_p
            order = np.argsort(-p, kind="stable")
            before = np.cumsum(p[order]) - p[order]
            p[order[before >= top_p]] = 0
            p /= p.sum()
        if min_p > 0:
            p[p < min_p * p.max()] = 0
            p /= p.sum()
        law[row] = p
    return law


def planted(law: Floats, amount: float = PLANTED) -> Floats:
    """The law with `amount` of mass moved, in every row, from the likeliest token to the least likely kept one."""
    biased = law.copy()
    for row in biased:
        kept = np.flatnonzero(row > 0)
        if len(kept) > 1:
            row[kept[np.argmin(row[kept])]] += amount
            row[kept[np.argmax(row[kept])]] -= amount
    return biased


def planted_in_the_likeliest(law: Floats, amount: float = PLANTED) -> Floats:
    """The same between the two likeliest tokens of every row: the transfer of `amount` that is hardest to find."""
    biased = law.copy()
    for row in biased:
        second, first = np.argsort(row, kind="stable")[-2:]
        row[first] -= amount
        row[second] += amount
    return biased


def g_test(counts: Floats, law: Floats) -> Verdict:
    """G over all rows: counts [C, V] against law [C, V]."""
    g, df = 0.0, 0
    for observed, p in zip(counts, law, strict=True):
        total = observed.sum()
        if not total:
            continue
        if np.any((p == 0) & (observed > 0)):
            return Verdict(np.inf, 1, 0.0, int(counts.sum()))
        cells = _merged(observed[p > 0], total * p[p > 0])
        for seen, expected in cells:
            g += 2 * seen * np.log(seen / expected) if seen else 0.0
        df += len(cells) - 1
    return Verdict(g, df, float(stats.chi2.sf(g, df)) if df else 1.0, int(counts.sum()))


def _merged(observed: Floats, expected: Floats) -> list[tuple[float, float]]:
    """Cells of one row; those that expect fewer than 5 are put together, smallest first."""
    cells: list[tuple[float, float]] = []
    seen, wanted = 0.0, 0.0
    for index in np.argsort(expected, kind="stable"):
        seen, wanted = seen + observed[index], wanted + expected[index]
        if wanted >= MIN_EXPECTED:
            cells.append((seen, wanted))
            seen, wanted = 0.0, 0.0
    if wanted:
        last = cells.pop() if cells else (0.0, 0.0)
        cells.append((last[0] + seen, last[1] + wanted))
    return cells


def stationary(law: Floats) -> Floats:
    """How often each context of an order-1 law is visited in the long run, [V]."""
    visits = np.full(len(law), 1 / len(law))
    for _ in range(1000):
        visits = 0.5 * visits + 0.5 * visits @ law
    return visits / visits.sum()


def noncentrality(law: Floats, biased: Floats) -> float:
    """λ a transition: Σ rows visits · 2·KL(law ‖ biased)."""
    ratio = np.where(law > 0, law / np.where(law > 0, biased, 1.0), 1.0)
    return float((stationary(law) * 2 * (law * np.log(ratio)).sum(axis=1)).sum())


def degrees(law: Floats) -> int:
    return int(((law > 0).sum(axis=1) - 1).sum())


def power(law: Floats, biased: Floats, samples: int) -> float:
    """Probability that `biased` is rejected on `samples` transitions of `law`."""
    df = degrees(law)
    return float(stats.ncx2.sf(stats.chi2.isf(SIGNIFICANCE, df), df, samples * noncentrality(law, biased)))


def needed(law: Floats, biased: Floats | None = None) -> int:
    """Transitions with which the planted bias is found with probability POWER, rounded up to a thousand."""
    biased = planted(law) if biased is None else biased
    low, high = 1_000, 10_000_000
    while high - low > 1_000:
        middle = (low + high) // 2
        low, high = (low, middle) if power(law, biased, middle) >= POWER else (middle, high)
    return -(-high // 1000) * 1000


def transitions(sequences: list[tuple[int, list[int]]], vocab: int) -> Floats:
    """Counts [V, V] of order-1 transitions in (last token before, tokens) pairs."""
    counts = np.zeros((vocab, vocab))
    for before, tokens in sequences:
        path = [before, *tokens]
        np.add.at(counts, (path[:-1], path[1:]), 1)
    return counts
