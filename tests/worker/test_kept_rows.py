"""Which row a prompt starts from, and which are kept for how long, on a toy executor whose logits tell all of a row."""

from __future__ import annotations

import random

import pytest

from execution.interface import Extension
from execution.toy import ToyExecutor
from protocol.endpoint import Peer
from protocol.messages import Open, Sampling, token_array
from worker.kept_rows import LEAST, ROW, SPARE_ROWS, KeptRows
from worker.table import Entry, common_prefix

V = 50
TOY = f"toy:vocab={V},state=hash,seed=3"
FIRST, SECOND, OTHER = ([start + i % 9 for i in range(60)] for start in (0, 10, 20))


class Rows:
    """KeptRows over a toy, with requests that feed what they are told."""

    def __init__(self, limit: int) -> None:
        self.executor = ToyExecutor(TOY)
        self.kept = KeptRows(self.executor, limit)
        self._ids = 0

    def open(self, prompt: list[int]) -> Entry:
        """The entry as it was opened: `cached` is what its row held already."""
        self._ids += 1
        key = (Peer(b"test"), self._ids)
        message = Open(self._ids, 1, 7, "coupled", "none", Sampling(1.0, 0, 1.0, 0.0), V, token_array(prompt))
        entry = Entry(key, message, list(prompt))
        self.kept.open(entry)
        assert entry.cached == prompt[: len(entry.cached)] and self.executor.length(entry.row) == len(entry.cached)
        return entry

    def feed(self, entry: Entry, more: list[int] = []) -> None:  # noqa: B006  # never written to
        """The rest of the prompt and then `more`, with the check that the row holds what it should."""
        entry.tokens = entry.tokens + more
        rest = entry.tokens[len(entry.cached) :]
        (logits,) = self.executor.extend([Extension(entry.row, rest, 1)])
        plain = self.executor.open()
        (expected,) = self.executor.extend([Extension(plain, entry.tokens, 1)])
        self.executor.close(plain)
        assert logits.tolist() == expected.tolist()
        entry.holds(list(entry.tokens))

    def keep(self, *prompts: list[int]) -> None:
        for prompt in prompts:
            entry = self.open(prompt)
            self.feed(entry)
            self.kept.close(entry, keep=True)

    def held(self, prompt: list[int]) -> int:
        """Tokens of `prompt` that a row holds; the request that asked is forgotten, and what it used with it."""
        entry = self.open(prompt)
        held = len(entry.cached)
        entry.sound = 0
        self.kept.close(entry, keep=True)
        return held

    @property
    def open_rows(self) -> int:
        return len(self.executor._lengths)


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2 == common_prefix([1, 2], [1, 2, 3])
    assert common_prefix([], [1]) == common_prefix([2], [1]) == 0


def test_the_next_turn_takes_the_row_over() -> None:
    rows = Rows(1000)
    first = rows.open(FIRST)
    rows.feed(first, SECOND)
    rows.kept.close(first, keep=True)
    assert len(rows.kept) == 1 and rows.open_rows == 1
    turn = rows.open(FIRST + SECOND + OTHER)
    assert turn.row == first.row and len(turn.cached) == 120 and len(rows.kept) == 0
    rows.feed(turn)


@pytest.mark.parametrize("tail, kept", [(LEAST - 1, 0), (LEAST, 1)])
def test_a_row_whose_end_is_still_worth_something_is_forked(tail: int, kept: int) -> None:
    rows = Rows(1000)
    rows.keep(FIRST + OTHER[:tail])
    entry = rows.open(FIRST + SECOND)
    assert len(entry.cached) == len(FIRST) and len(rows.kept) == kept
    rows.feed(entry)
    if kept:
        assert rows.held(FIRST + OTHER) == len(FIRST) + tail


@pytest.mark.parametrize("shared, held", [(LEAST - 1, 0), (LEAST, LEAST)])
def test_a_short_prefix_is_not_used(shared: int, held: int) -> None:
    rows = Rows(1000)
    rows.keep(FIRST)
    entry = rows.open(FIRST[:shared] + SECOND)
    assert len(entry.cached) == held and len(rows.kept) == 1
    live = rows.open(OTHER)
    rows.feed(live)
    assert len(rows.open(OTHER[:shared] + SECOND).cached) == held


def test_the_last_token_of_a_prompt_is_always_fed() -> None:
    rows = Rows(1000)
    rows.keep(FIRST)
    again = rows.open(FIRST)
    assert len(again.cached) == len(FIRST) - 1
    rows.feed(again)
    assert len(rows.open(FIRST).cached) == len(FIRST) - 1


def test_a_live_row_is_forked_and_stays() -> None:
    rows = Rows(1000)
    live = rows.open(FIRST)
    rows.feed(live)
    entry = rows.open(FIRST + SECOND)
    assert entry.row != live.row and len(entry.cached) == len(FIRST)
    rows.feed(entry)
    rows.feed(live, OTHER)


def test_what_no_finite_logits_have_followed_serves_nobody() -> None:
    """A prompt that is still going in, and one that ends before anything was read."""
    rows = Rows(1000)
    live = rows.open(FIRST)
    rows.executor.extend([Extension(live.row, FIRST, 0)])
    live.cached = list(FIRST)
    assert rows.held(FIRST) == 0
    rows.kept.close(live, keep=True)
    assert len(rows.kept) == 0 and rows.open_rows == 0


def test_a_row_that_was_rolled_back_holds_no_more_than_it_does() -> None:
    """Between the message that rolls a row back and the pass that feeds it, `cached` is what it will hold."""
    rows = Rows(1000)
    live = rows.open(FIRST)
    rows.feed(live)
    rows.executor.truncate(live.row, 30)
    live.cached = FIRST[:30] + SECOND
    assert len(rows.open(FIRST[:30] + SECOND).cached) == 30


def test_the_longest_prefix_wins_kept_or_live() -> None:
    rows = Rows(1000)
    rows.keep(FIRST + OTHER, FIRST + SECOND[:40] + OTHER)
    assert rows.held(FIRST + SECOND) == 100
    live = rows.open(FIRST + SECOND[:50])
    rows.feed(live)
    entry = rows.open(FIRST + SECOND)
    assert len(entry.cached) == 110
    rows.feed(entry)


def test_the_least_recently_used_goes_first() -> None:
    rows = Rows(3 * ROW)
    rows.keep(FIRST, SECOND, OTHER)
    assert len(rows.kept) == 3
    entry = rows.open(FIRST[:30] + OTHER[:30])  # forks the first, which isn't the oldest any more
    rows.kept.close(entry, keep=True)
    assert len(rows.kept) == 3, "the new one holds 30 of the first one's tokens and is not needed"
    rows.keep([V - 1 - token for token in FIRST])
    assert [rows.held(prompt) for prompt in (SECOND, FIRST, OTHER)] == [0, 59, 59]


def test_rows_are_a_rectangle_and_live_ones_widen_it() -> None:
    rows = Rows(3 * ROW)
    rows.keep(FIRST, SECOND, OTHER)
    live = rows.open([V - 1] * ROW)
    rows.feed(live)
    assert len(rows.kept) == 3
    rows.feed(live, FIRST[:1])
    rows.kept.make_room()
    assert len(rows.kept) == 2
    rows.feed(live, [1] * (ROW // 2))
    rows.kept.make_room()
    assert len(rows.kept) == 1 and rows.held(OTHER) == 59
    rows.feed(live, [1] * 2 * ROW)
    rows.kept.make_room()
    assert len(rows.kept) == 0 and rows.open_rows == 1


def test_a_short_row_counts_as_a_whole_one() -> None:
    """Each is a comparison for every prompt, and a sequence of an engine that has few."""
    rows = Rows(4 * ROW + ROW - 1)
    rows.keep(*([start] * LEAST for start in range(V)))
    assert len(rows.kept) == 4 == rows.open_rows


def test_of_a_row_beyond_the_limit_its_start_is_kept() -> None:
    rows = Rows(100)
    rows.keep(FIRST + SECOND)
    assert len(rows.kept) == 1
    entry = rows.open(FIRST + SECOND)
    assert len(entry.cached) == 100
    rows.feed(entry)


def test_rows_that_hold_nearly_the_same_are_kept_once() -> None:
    rows = Rows(1000)
    rows.keep(FIRST, FIRST + SECOND[: LEAST - 1], FIRST)
    assert len(rows.kept) == 1
    assert rows.held(FIRST + SECOND) == len(FIRST) + LEAST - 1


def test_where_something_went_wrong_nothing_is_kept() -> None:
    rows = Rows(1000)
    rows.keep(FIRST, SECOND)
    entry = rows.open(OTHER)
    rows.feed(entry)
    rows.kept.close(entry, keep=False)
    assert len(rows.kept) == 0 and rows.open_rows == 0


def test_off() -> None:
    rows = Rows(0)
    rows.keep(FIRST)
    assert len(rows.kept) == 0 and rows.open_rows == 0
    live = rows.open(FIRST)
    rows.feed(live)
    assert rows.open(FIRST).cached == []


def test_a_random_life_stays_within_the_limit_and_right() -> None:
    """`Rows.open` and `feed` check each row's content; no row is lost, and the limit holds after each step."""
    chance, rows, live = random.Random(5), Rows(400), list[Entry]()
    texts, reused = [FIRST, SECOND, OTHER], 0
    for _ in range(1500):
        what = chance.random()
        if what < 0.4 and len(live) < 6:
            past = chance.choice(texts)
            entry = rows.open(past[: chance.randint(1, len(past))] + chance.choices(range(V), k=chance.randint(0, 30)))
            reused += len(entry.cached) > 0
            rows.feed(entry)
            live.append(entry)
        elif what < 0.7 and live:
            rows.feed(chance.choice(live), chance.choices(range(V), k=chance.randint(1, 20)))
            rows.kept.make_room()
        elif live:
            entry = live.pop(chance.randrange(len(live)))
            texts = [*texts[-20:], entry.tokens]
            rows.kept.close(entry, keep=chance.random() < 0.95)
        lengths = [rows.executor.length(row) for row in rows.executor._lengths]
        assert len(lengths) == len(live) + len(rows.kept)
        assert len(rows.kept) * max(lengths, default=0) <= 400
    assert reused > 100


def test_an_executor_of_few_rows_keeps_some_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept rows give way before the last SPARE_ROWS are gone."""
    rows, most = Rows(limit=100_000), SPARE_ROWS + 8
    monkeypatch.setattr(ToyExecutor, "free_rows", property(lambda self: most - len(self._lengths)), raising=False)
    rows.keep(*([index] * 40 for index in range(12)))
    assert len(rows.kept) == 8
    live = [rows.open([index] * 40) for index in range(20)]
    assert len(rows.kept) == 0 and rows.executor.free_rows == most - len(live)
