"""The text of --synthetic."""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.bench.synthetic import Synthetic, parse_synthetic
from orchestrator.config import RuntimeConfig
from orchestrator.errors import UsageError


def test_every_key_and_unit() -> None:
    found = parse_synthetic(
        "target=0.05s draft=1500us alpha=.6 rtt=15ms, vocab=512 bandwidth=250Mbps entropy=1.3 seed=7 token=40µs"
    )
    assert dataclasses.astuple(found) == pytest.approx((0.05, 0.0015, 0.6, 0.015, 512, 250e6, 1.3, 7, 40e-6))
    assert found.link.round_trip == 0.015 and found.link.bytes_per_second == pytest.approx(31.25e6)


def test_all_keys_have_defaults() -> None:
    assert parse_synthetic("") == parse_synthetic(
        "target=30ms draft=3ms alpha=0.8 rtt=0ms vocab=4096 bandwidth=1Gbps entropy=2.7 seed=0 token=0"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("targt=3ms", "'targt=3ms' is unknown: expected KEY=VALUE with KEY of target, draft"),
        ("target", "'target' is unknown"),
        ("target=3ms target=4ms", "names target twice"),
        ("target=3", "target=3: expected a unit of s, ms, us"),
        ("draft=3min", "draft=3min: expected a unit"),
        ("bandwidth=1GB", "expected a unit of kbps, Mbps, Gbps"),
        ("alpha=0.8ms", "alpha=0.8ms: expected no unit"),
        ("alpha=high", "alpha=high: expected a number"),
        ("alpha=-1", "alpha=-1: expected a number"),
        ("vocab=1e3", "vocab=1e3: expected a whole number"),
        ("vocab=1", "vocab=1 is out of range"),
        ("alpha=1.5", "alpha=1.5 is out of range"),
        ("target=0ms", "target must be more than 0"),
        ("bandwidth=0", "bandwidth must be more than 0"),
        ("vocab=8 entropy=2.1", "at most ln(vocab) = 2.08"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_synthetic(text)
    assert said in str(caught.value)


def test_the_models_that_it_asks_for() -> None:
    found = Synthetic(seed=3, token=0.002).configure(RuntimeConfig(verify="coupled"))
    assert found.target_model == "synthetic:step_ms=30,vocab=4096,entropy=2.7,seed=3,token_ms=2"
    assert found.draft_model == "synthetic:step_ms=3,vocab=4096,entropy=2.7,seed=3,alpha=0.8"
    assert (found.target, found.draft, found.target_threads, found.draft_threads) == ("cpu", "cpu", 1, 1)
    assert found.verify == "coupled"


def test_it_takes_no_other_models() -> None:
    with pytest.raises(UsageError, match="leave out --target-model, --draft"):
        Synthetic().configure(RuntimeConfig(target_model="gpt2", draft="tcp://127.0.0.1:7070"))
