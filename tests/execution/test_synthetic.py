"""The synthetic model: distributions of the entropy and acceptance asked for, passes of the duration asked for."""

from __future__ import annotations

import math
import statistics
import time

import pytest
import torch

from execution import load
from execution.errors import ContextFull, ModelError
from execution.interface import Extension
from execution.synthetic import SyntheticExecutor, synthetic_table
from execution.synthetic_spec import SyntheticSpec


def table(options: str) -> torch.Tensor:
    """Probabilities as a sampler sees them, float64 [contexts, vocab]."""
    return synthetic_table(SyntheticSpec.parse(f"synthetic:vocab=512,{options}")).double().softmax(-1)


@pytest.mark.parametrize("alpha", [1 / 256, 0.05, 0.3, 0.8, 0.97, 1])
@pytest.mark.parametrize("entropy", [1e-4, 0.4, 2.7, math.log(512) - 1e-9])
def test_acceptance_is_alpha_in_every_context(alpha, entropy, monkeypatch):
    monkeypatch.setattr("execution.synthetic._CHUNK", 1 << 16)  # several: a draft's own draws shift no order of p
    p, q = table(f"entropy={entropy}"), table(f"entropy={entropy},alpha={alpha}")
    assert p.shape == q.shape == (512, 512)
    assert float((torch.minimum(p, q).sum(-1) - alpha).abs().max()) < 1e-4
    assert torch.equal(p, q) == (alpha == 1)


def test_noise_of_a_draft_differs_from_context_to_context():
    p, q = table("alpha=1"), table("alpha=0.8")
    order = p.argsort(-1, descending=True)
    ratio = q.gather(1, order) / p.gather(1, order)  # by rank
    assert ratio.std(0)[:20].min() > 0.1
    assert (q.argmax(-1) == p.argmax(-1)).double().mean() > 0.5  # a draft at 0.8 resembles its target


def test_distributions_are_zipf_of_the_entropy_on_ids_of_their_own():
    p = table("entropy=2.7,seed=4")
    assert float((-(p * p.log()).sum(-1) - 2.7).abs().max()) < 1e-4
    ranked = p.sort(-1, descending=True).values
    torch.testing.assert_close(ranked, ranked[:1].expand_as(ranked))
    slopes = ranked[0].log().diff() / torch.arange(1, 513).double().log().diff()
    assert slopes.max() < 0 and float(slopes.std()) < 1e-2 * float(slopes.mean().abs())
    firsts = p.argmax(-1)
    assert len(firsts.unique()) > 250  # of 512 draws from 512
    assert torch.equal(p, table("entropy=2.7,seed=4")) and not torch.equal(p, table("entropy=2.7,seed=5"))


def test_large_vocabularies_have_fewer_contexts():
    assert [SyntheticSpec(vocab=vocab).contexts for vocab in (2, 4096, 49_152, 65_536)] == [512, 512, 341, 256]


def test_logits_are_the_table_by_the_whole_prefix():
    executor = SyntheticExecutor("synthetic:vocab=512,step_ms=0")
    row, other = executor.open(), executor.open()
    text = [5, 6, 7, 8, 9, 10, 11]
    [whole] = executor.extend([Extension(row, text, 7)])
    held = (whole[:, None] == executor._table).all(-1)
    assert held.any(-1).all() and len(held.long().argmax(-1).unique()) > 4
    pieces = executor.extend([Extension(other, text[:3], 3)]) + executor.extend([Extension(other, text[3:], 4)])
    assert torch.equal(torch.cat(pieces), whole)
    fork = executor.fork(row, 2)
    assert torch.equal(executor.extend([Extension(fork, text[2:5], 3)])[0], whole[2:5])
    executor.truncate(fork, 0)
    changed = executor.extend([Extension(fork, [4, *text[1:]], 7)])[0]  # one early token
    assert not (changed == whole).all(-1).all() and not torch.equal(changed[-1], whole[-1])
    with pytest.raises(ContextFull):
        executor.extend([Extension(row, [1] * 4090, 1)])


def seconds(executor: SyntheticExecutor, counts: list[int]) -> float:
    """Median time of a pass that feeds these counts of tokens to as many rows."""
    found = []
    for _ in range(5):
        rows = [executor.open() for _ in counts]
        batch = [Extension(row, [1] * count, 1) for row, count in zip(rows, counts, strict=True)]
        start = time.perf_counter()
        executor.extend(batch)
        found.append(time.perf_counter() - start)
        assert found[-1] >= expected(executor.spec, counts)
    return statistics.median(found)


def expected(spec: SyntheticSpec, counts: list[int]) -> float:
    return (spec.step_ms + spec.token_ms * (sum(counts) - 1)) / 1000


@pytest.mark.parametrize("counts", [[1], [1] * 8, [4, 60]])
def test_a_pass_lasts_as_long_as_asked(counts):
    flat, rising = (
        SyntheticExecutor(f"synthetic:vocab=512,{times}") for times in ("step_ms=8", "step_ms=2,token_ms=0.5")
    )
    for executor in (flat, rising):
        assert seconds(executor, counts) < expected(executor.spec, counts) + 0.05  # far off; a machine may be loaded


def test_a_refused_batch_does_not_wait():
    executor = SyntheticExecutor("synthetic:vocab=512,step_ms=60000")
    with pytest.raises(ValueError, match="row 3: is not open"):
        executor.extend([Extension(3, [1], 1)])
    assert executor.extend([]) == []


def test_loading():
    executor, words = load("synthetic:vocab=512,step_ms=0,context=100,eos=7")
    assert (executor.vocab_size, executor.context_length, words.size, words.eos_ids) == (512, 100, 512, (7,))
    assert executor.model == "synthetic:vocab=512,step_ms=0,context=100,eos=7"
    _, words = load("synthetic:vocab=65536")
    assert len(list(words.pairs)) == words.size == 65536 and words.eos_ids == ()
    assert load("synthetic")[0].vocab_size == 4096


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("step=3", "synthetic model 'synthetic:step=3' has no option 'step': it has vocab, entropy, alpha"),
        ("vocab=x", "vocab='x' is not of type int"),
        ("seed=3,seed=4", "twice"),
        ("vocab=1", "vocab must be 2 to 65536"),
        ("vocab=65537", "vocab must be 2 to 65536"),
        ("entropy=0", "entropy must be above 0 and at most"),
        ("vocab=4,entropy=1.39", r"log\(vocab\) = 1.3863"),
        ("entropy=nan", "entropy must be"),
        ("alpha=0", "alpha must be 2/vocab = 0.00049 to 1"),
        ("alpha=1.01", "alpha must be"),
        ("alpha=nan", "alpha must be"),
        ("seed=-1", "seed must be"),
        ("step_ms=-1", "step_ms must be"),
        ("token_ms=inf", "token_ms must be"),
        ("context=0", "context must be"),
        ("eos=4096", "eos must be"),
    ],
)
def test_bad_references_are_one_line(options, text):
    with pytest.raises(ModelError, match=text) as caught:
        load(f"synthetic:{options}")
    assert "\n" not in str(caught.value)
