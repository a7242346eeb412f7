"""Whether a pass waits for requests that should be back. Times are made up: a pass of 30 ms, a longest wait of 3."""

from __future__ import annotations

import pytest

from protocol.endpoint import Peer
from worker.returning import Returning

PASS = 0.03
A, B = ((Peer(b"test"), request_id) for request_id in (1, 2))


def expecting(*keys: tuple[Peer, int]) -> Returning:
    returning = Returning()
    returning.expect(set(keys), 10.0, PASS)
    return returning


def test_waits_until_all_are_back_but_no_longer_than_a_share_of_a_pass() -> None:
    returning = expecting(A, B)
    assert returning.wait(10.0, PASS, ready=2) == pytest.approx(0.003)
    returning.back(A, 10.001)
    assert returning.wait(10.001, PASS, ready=3) == pytest.approx(0.002)
    assert returning.wait(10.0031, PASS, ready=3) == 0
    returning.back(B, 10.002)
    assert returning.wait(10.002, PASS, ready=4) == 0


def test_a_long_pass_waits_four_milliseconds_at_most() -> None:
    returning = Returning()
    returning.expect({A}, 10.0, 2.0)
    assert returning.wait(10.0, 2.0, ready=1) == pytest.approx(0.004)


def test_many_that_are_ready_do_not_wait_for_few() -> None:
    """One that misses a pass loses 30 ms; nine lose 27 by waiting 3, eleven lose 33."""
    returning = expecting(A)
    assert returning.wait(10.0, PASS, ready=9) > 0
    assert returning.wait(10.0, PASS, ready=11) == 0


def test_nobody_waits_for_a_request_that_ended() -> None:
    returning = expecting(A)
    returning.gone(A)
    assert returning.wait(10.0, PASS, ready=1) == 0


def test_requests_that_always_come_too_late_are_not_waited_for_and_those_that_mend_are_again() -> None:
    returning = expecting(A)
    for turn in range(30):
        returning.expect({A}, 20.0 + turn, PASS)  # A isn't back: too late
    assert returning.wait(49.0, PASS, ready=1) == 0
    for turn in range(30):
        returning.back(A, 50.0 + turn + 0.001)
        returning.expect({A}, 51.0 + turn, PASS)
    assert returning.wait(80.0, PASS, ready=1) > 0
