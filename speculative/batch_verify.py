"""Verification of many requests' blocks in one call, for the target worker: ragged γ, one outcome a request.

Request i drafted gammas[i] tokens; the target scored gammas[i] + 1 rows for it. Rows, and drafted tokens, stand one
request after another. A bad value in one request fails that request and no other; a shape that fits no reading of the
batch raises ValueError. Imports torch and this package's noise and race.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from speculative.noise import Stream, uniform
from speculative.racing import race, rows_together

Origin = Literal["correction", "bonus"]


@dataclass(frozen=True)
class Outcome:
    """The verdict on one block: `accepted` drafted tokens stay, and `token` (correction or bonus) follows them.

    With `error` set nothing was decided: accepted is 0 and token -1.
    """

    accepted: int
    token: int
    origin: Origin
    error: str | None = None


@dataclass(frozen=True)
class _Layout:
    """Where each request's rows and drafted tokens lie in the concatenated batch."""

    gammas: list[int]
    first_row: list[int]
    first_draft: list[int]

    @staticmethod
    def of(log_p: Tensor, gammas: Sequence[int], drafted: Tensor) -> _Layout:
        sizes = [int(gamma) for gamma in gammas]
        if any(gamma < 0 for gamma in sizes):
            raise ValueError(f"gammas are {sizes}; expected integers >= 0: a request without a draft has γ = 0")
        rows = sum(sizes) + len(sizes)
        if log_p.dim() != 2 or log_p.shape[0] != rows or log_p.shape[1] == 0:
            raise ValueError(
                f"the target's rows have shape {tuple(log_p.shape)}; expected [Σ(γ + 1), V] = [{rows}, V] for gammas "
                f"{sizes}: give each request one row more than it has drafted tokens"
            )
        if drafted.dtype != torch.int64 or drafted.shape != (sum(sizes),):
            raise ValueError(
                f"drafted tokens are {drafted.dtype} {tuple(drafted.shape)}; expected int64 [Σγ] = [{sum(sizes)}]"
            )
        first_row, first_draft, total = [], [], 0
        for number, gamma in enumerate(sizes):
            first_row.append(total + number)
            first_draft.append(total)
            total += gamma
        return _Layout(sizes, first_row, first_draft)


def verify_greedy(log_p: Tensor, gammas: Sequence[int], drafted: Tensor) -> list[Outcome]:
    """Temperature 0: keep drafted tokens while they are the row's argmax (the lowest id of a tie).

    log_p [Σ(γ + 1), V], log-probabilities or logits; drafted int64 [Σγ].
    """
    drafted = drafted.cpu()
    layout = _Layout.of(log_p, gammas, drafted)
    errors = _errors(log_p, layout, drafted)
    choices = log_p.argmax(dim=-1).tolist()
    return _keep_while_equal(choices, layout, drafted.tolist(), errors)


def verify_coupled(
    log_p: Tensor, gammas: Sequence[int], drafted: Tensor, seeds: Sequence[int], positions: Sequence[int]
) -> list[Outcome]:
    """Keep drafted tokens while they are the target's own draw, argmax(log p + gumbel(RACE, position)), of that row.

    log_p float32 [Σ(γ + 1), V]; drafted int64 [Σγ]; positions[i] is the index in the token sequence of request i's
    first drafted token. What is emitted depends on the target, the seed and the position alone. On a CPU a row is
    drawn when those before it were kept, or where it costs little beside others.
    """
    drafted = drafted.cpu()
    layout = _Layout.of(log_p, gammas, drafted)
    _check_noise(layout, seeds, positions)
    errors = _errors(log_p, layout, drafted)
    wanted = drafted.tolist()
    choices = [-1] * len(log_p)
    going, start = [i for i, error in enumerate(errors) if error is None], 0
    together = rows_together(log_p)
    while going:
        end = start + max(1, together // len(going))
        cells = [(i, k) for i in going for k in range(start, min(end, layout.gammas[i] + 1))]
        rows = [layout.first_row[i] + k for i, k in cells]
        tokens = race(
            log_p[torch.tensor(rows, device=log_p.device)],
            [seeds[i] for i, _ in cells],
            Stream.RACE,
            [positions[i] + k for i, k in cells],
        )
        for row, token in zip(rows, tokens.tolist(), strict=True):
            choices[row] = token
        going = [i for i in going if _kept_from(start, end, choices, wanted, layout, i)]
        start = end
    return _keep_while_equal(choices, layout, wanted, errors)


def _kept_from(start: int, end: int, choices: list[int], drafted: list[int], layout: _Layout, i: int) -> bool:
    """Whether all of request i's drafted tokens from `start` to before `end` are its choices, and a row follows."""
    row, first = layout.first_row[i], layout.first_draft[i]
    return end <= layout.gammas[i] and choices[row + start : row + end] == drafted[first + start : first + end]


def verify_rejection(
    log_p: Tensor,
    gammas: Sequence[int],
    drafted: Tensor,
    q_ids: Tensor,
    q_probs: Tensor,
    seeds: Sequence[int],
    positions: Sequence[int],
) -> list[Outcome]:
    """Modified rejection sampling (Leviathan et al. 2023, Chen et al. 2023) with named noise.

    log_p float32 [Σ(γ + 1), V]; drafted int64 [Σγ]; q̃ sparse as q_ids int64 [Σγ, K] and q_probs float64 [Σγ, K], padded
    with id 0 and probability 0 (a point mass has K = 1). Draft token d is kept while u·q̃(d) < p(d) in float64, with
    u of stream ACCEPT at its position; the first refused one is replaced by a draw from (p - q̃)₊, or from p where that
    is 0 everywhere (stream RESIDUAL); when all stay, a bonus is drawn from the last row's p (stream BONUS). A token
    that q̃ calls impossible is never kept.
    """
    drafted, q_ids, q_probs = drafted.cpu(), q_ids.cpu(), q_probs.cpu()
    layout = _Layout.of(log_p, gammas, drafted)
    _check_noise(layout, seeds, positions)
    _check_q_shape(layout, q_ids, q_probs)
    errors = _errors(log_p, layout, drafted)
    _add_q_errors(errors, layout, q_ids, q_probs, log_p.shape[1])
    q_ids = q_ids.clamp(0, log_p.shape[1] - 1)  # what is out of range has its error by now
    accepted = _accepted_lengths(log_p, layout, drafted, q_ids, q_probs, seeds, positions, errors)

    going = [i for i, error in enumerate(errors) if error is None]
    if not going:
        return _outcomes(accepted, [], layout, errors)
    at = torch.tensor([layout.first_row[i] + accepted[i] for i in going], device=log_p.device)
    rows = log_p[at].to(torch.float32)  # [R, V], a copy
    refused = [
        (row, layout.first_draft[i] + accepted[i]) for row, i in enumerate(going) if accepted[i] < layout.gammas[i]
    ]
    if refused:
        where, drafts = (torch.tensor(column) for column in zip(*refused, strict=True))
        where = where.to(rows.device)
        rows[where] = _log_residual(rows[where], q_ids[drafts], q_probs[drafts])
    tokens = race(
        rows,
        [seeds[i] for i in going],
        [Stream.RESIDUAL if accepted[i] < layout.gammas[i] else Stream.BONUS for i in going],
        [positions[i] + accepted[i] for i in going],
    )
    return _outcomes(accepted, tokens.tolist(), layout, errors)


def _accepted_lengths(
    log_p: Tensor,
    layout: _Layout,
    drafted: Tensor,
    q_ids: Tensor,
    q_probs: Tensor,
    seeds: Sequence[int],
    positions: Sequence[int],
    errors: list[str | None],
) -> list[int]:
    """How many leading drafted tokens of each request pass u·q̃ < p."""
    if not len(drafted):
        return [0] * len(layout.gammas)
    rows = [first + k for first, gamma in zip(layout.first_row, layout.gammas, strict=True) for k in range(gamma)]
    row_seeds = [seed for seed, gamma in zip(seeds, layout.gammas, strict=True) for _ in range(gamma)]
    places = [place + k for place, gamma in zip(positions, layout.gammas, strict=True) for k in range(gamma)]
    safe = drafted.clamp(0, log_p.shape[1] - 1)  # an id out of range has its error already
    log_at = log_p[torch.tensor(rows, device=log_p.device), safe.to(log_p.device)]
    p = log_at.cpu().to(torch.float64).exp()
    q = torch.where(q_ids == drafted.unsqueeze(1), q_probs, 0.0).sum(dim=-1)
    u = uniform(row_seeds, Stream.ACCEPT, places)
    kept = ((u * q < p) & (q > 0)).tolist()  # strict: u may be 0, and p = 0 must not pass
    lengths = []
    for first, gamma, error in zip(layout.first_draft, layout.gammas, errors, strict=True):
        block = kept[first : first + gamma] if error is None else [False]
        lengths.append(block.index(False) if False in block else gamma)
    return lengths


def _log_residual(log_p: Tensor, q_ids: Tensor, q_probs: Tensor) -> Tensor:
    """log (p - q̃)₊, not normalised, where that has mass, else log p: [R, V], [R, K], [R, K] -> float32 [R, V].

    Only the K entries that q̃ names are computed anew, in float64 on the CPU; the rest of (p - q̃)₊ is p.
    """
    ids = q_ids.to(log_p.device)
    p = log_p.gather(1, ids).cpu().to(torch.float64).exp()
    left = (p - q_probs).clamp_(min=0.0).log_().to(torch.float32)
    left[q_probs == 0] = math.inf  # padding, or no claim: leaves log p as it is under the minimum
    residual = log_p.scatter_reduce(1, ids, left.to(log_p.device), reduce="amin", include_self=True)
    empty = residual.amax(dim=-1, keepdim=True) == -math.inf
    return torch.where(empty, log_p, residual)


def _keep_while_equal(
    choices: list[int], layout: _Layout, drafted: list[int], errors: list[str | None]
) -> list[Outcome]:
    accepted, tokens = [], []
    for row, first, gamma, error in zip(layout.first_row, layout.first_draft, layout.gammas, errors, strict=True):
        own = choices[row : row + gamma + 1]
        kept = next((k for k in range(gamma) if own[k] != drafted[first + k]), gamma)
        accepted.append(kept)
        if error is None:
            tokens.append(own[kept])
    return _outcomes(accepted, tokens, layout, errors)


def _outcomes(accepted: list[int], tokens: list[int], layout: _Layout, errors: list[str | None]) -> list[Outcome]:
    """One Outcome a request; `tokens` holds one for each request without an error, in order."""
    following = iter(tokens)
    return [
        Outcome(kept, next(following), "correction" if kept < gamma else "bonus")
        if error is None
        else Outcome(0, -1, "correction", error)
        for kept, gamma, error in zip(accepted, layout.gammas, errors, strict=True)
    ]


def _errors(log_p: Tensor, layout: _Layout, drafted: Tensor) -> list[str | None]:
    """What is wrong with each request's rows or drafted ids, None where nothing is."""
    vocab = log_p.shape[1]
    broken = (~log_p.amax(dim=-1).isfinite()).tolist()  # amax carries NaN
    wild = ((drafted < 0) | (drafted >= vocab)).tolist()
    errors: list[str | None] = []
    for row, first, gamma in zip(layout.first_row, layout.first_draft, layout.gammas, strict=True):
        if True in broken[row : row + gamma + 1]:
            place = broken.index(True, row) - row
            errors.append(f"the target's row {place} of this block is NaN or has no finite maximum")
        elif True in wild[first : first + gamma]:
            token = int(drafted[wild.index(True, first)])
            errors.append(f"drafted id {token} is out of range; expected 0 <= id < {vocab}, the target's vocabulary")
        else:
            errors.append(None)
    return errors


def _add_q_errors(errors: list[str | None], layout: _Layout, q_ids: Tensor, q_probs: Tensor, vocab: int) -> None:
    """Marks requests whose q̃ names ids outside the target's vocabulary or holds no distribution."""
    wild = ((q_ids < 0) | (q_ids >= vocab)).any(dim=-1)
    bad = ~((q_probs >= 0).all(dim=-1) & ((q_probs.sum(dim=-1) - 1).abs() < 1e-6))
    twice = _repeated(q_ids, q_probs)
    if not bool((wild | bad | twice).any()):
        return
    for i, (first, gamma) in enumerate(zip(layout.first_draft, layout.gammas, strict=True)):
        block = slice(first, first + gamma)
        if errors[i] is not None:
            continue
        if bool(wild[block].any()):
            ids = q_ids[block]
            culprit = int(ids[(ids < 0) | (ids >= vocab)][0])
            errors[i] = f"q̃ names id {culprit}; expected 0 <= id < {vocab}, the target's vocabulary"
        elif bool(bad[block].any()):
            errors[i] = "q̃ is no distribution; expected probabilities >= 0 that sum to 1 at each drafted position"
        elif bool(twice[block].any()):
            errors[i] = "q̃ names an id twice at one position; expected each id once, with its whole probability"


def _repeated(q_ids: Tensor, q_probs: Tensor) -> Tensor:
    """True for each row that gives one id two probabilities above 0 -> bool [Σγ]."""
    if q_ids.shape[1] < 2 or not len(q_ids):
        return torch.zeros(len(q_ids), dtype=torch.bool)
    if bool((q_ids[:, 1:] > q_ids[:, :-1]).all()):  # ascending, as dense rows are
        return torch.zeros(len(q_ids), dtype=torch.bool)
    distinct_padding = -1 - torch.arange(q_ids.shape[1])
    ordered = torch.where(q_probs > 0, q_ids, distinct_padding).sort(dim=-1).values
    return (ordered[:, 1:] == ordered[:, :-1]).any(dim=-1)


def _check_noise(layout: _Layout, seeds: Sequence[int], positions: Sequence[int]) -> None:
    if not len(layout.gammas) == len(seeds) == len(positions):
        raise ValueError(
            f"{len(layout.gammas)} requests, {len(seeds)} seeds and {len(positions)} positions; expected one of each a "
            "request"
        )


def _check_q_shape(layout: _Layout, q_ids: Tensor, q_probs: Tensor) -> None:
    drafts = sum(layout.gammas)
    if q_ids.dim() != 2 or q_ids.shape != q_probs.shape or len(q_ids) != drafts:
        raise ValueError(
            f"q_ids {tuple(q_ids.shape)} and q_probs {tuple(q_probs.shape)}; expected both [Σγ, K] = [{drafts}, K]: "
            "pad shorter rows with id 0 and probability 0"
        )
    if q_ids.dtype != torch.int64 or q_probs.dtype != torch.float64:
        raise ValueError(f"q_ids are {q_ids.dtype} and q_probs {q_probs.dtype}; expected int64 and float64")
