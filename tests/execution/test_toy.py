"""The toy model: its law is its table, its state rolls back, its failures come when asked for."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer

from execution import load
from execution.errors import ContextFull, ModelError, RowError
from execution.interface import Extension
from execution.toy import ToyExecutor, toy_table


def test_logits_are_the_table():
    reference = "toy:vocab=5,order=2,seed=3,temperature=0.5"
    executor, table = ToyExecutor(reference), toy_table(reference)
    assert table.shape == (25, 5)
    torch.testing.assert_close(table, toy_table("toy:vocab=5,order=2,seed=3") * 2)
    row, other = executor.open(), executor.open()
    found = executor.extend([Extension(row, [1, 2, 3], 2), Extension(other, [4], 1)])
    assert torch.equal(found[0], table[[1 * 5 + 2, 2 * 5 + 3]])
    assert torch.equal(found[1], table[[0 * 5 + 4]])  # before the beginning stands token 0
    executor.truncate(row, 2)
    assert torch.equal(executor.extend([Extension(row, [0], 1)])[0], table[[2 * 5 + 0]])
    executor.close(row)
    again = executor.open()  # in the slot of the closed row
    assert torch.equal(executor.extend([Extension(again, [3], 1)])[0], table[[3]])


def test_orders_and_growth():
    flat = ToyExecutor("toy:vocab=4,order=0,seed=1")
    row = flat.open()
    assert torch.equal(flat.extend([Extension(row, [1] * 300, 2)])[0], toy_table("toy:vocab=4,order=0,seed=1")[[0, 0]])
    assert flat.length(row) == 300
    with pytest.raises(ContextFull):
        flat.extend([Extension(row, [1] * 4000, 1)])


def test_noise_makes_a_draft_that_resembles_its_target():
    target, near, far = (toy_table(f"toy:seed=1,noise={noise},noise_seed=7") for noise in (0, 0.1, 3))
    distances = [float((target.softmax(-1) - other.softmax(-1)).abs().sum(-1).mean()) / 2 for other in (near, far)]
    assert 0 < distances[0] < 0.1 < 0.3 < distances[1]


def test_hash_state_catches_a_stale_prefix():
    """Fault E3: tokens that were rolled back and came again differently give other logits; the same give the same."""
    executor = ToyExecutor("toy:vocab=7,state=hash,seed=2")
    reference = executor.open()
    want = executor.extend([Extension(reference, [1, 2, 3, 4, 5], 1)])[0]
    row = executor.open()
    executor.extend([Extension(row, [1, 2, 3, 6, 6, 6], 3)])
    executor.truncate(row, 3)
    assert torch.equal(executor.extend([Extension(row, [4, 5], 1)])[0], want)
    stale = executor.open()
    executor.extend([Extension(stale, [1, 2, 3, 6], 0)])  # not rolled back
    assert not torch.equal(executor.extend([Extension(stale, [4, 5], 1)])[0], want)


def test_batch_composition_changes_no_bit():
    executor = ToyExecutor("toy:vocab=11,order=2,state=hash")
    texts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [0, 0]]
    solo = []
    for text in texts:
        solo += executor.extend([Extension(executor.open(), text, len(text))])
    rows = [executor.open() for _ in texts]
    batch = executor.extend([Extension(row, text, len(text)) for row, text in zip(rows, texts, strict=True)])
    assert all(torch.equal(one, other) for one, other in zip(solo, batch, strict=True))


@pytest.mark.parametrize("order", [0, 1, 2])
def test_padded_model_agrees_over_the_shared_ids(order):
    """Fault A1: the same tokenizer, a wider model; what both can say is said alike."""
    narrow, wide = toy_table(f"toy:vocab=8,order={order}"), toy_table(f"toy:vocab=8,padded=2,order={order}")
    assert wide.shape == (10**order, 10)
    shared = wide.view(*[10] * order, 10)[(slice(8),) * (order + 1)]
    assert torch.equal(shared.reshape(-1, 8), narrow)
    assert torch.isfinite(wide).all()  # the padded ids have mass: they come by residual and bonus
    (model, words), (_, padded_words) = load("toy:vocab=8,padded=2"), load("toy:vocab=8")
    assert model.vocab_size == 10 and words.size == 8
    assert list(words.pairs) == list(padded_words.pairs)


def test_special_rows():
    nan = ToyExecutor("toy:vocab=6,nan_token=5")
    rows = [nan.open(), nan.open()]
    found = nan.extend([Extension(rows[0], [5, 1], 2), Extension(rows[1], [1, 2], 2)])
    assert torch.isnan(found[0][0]).all() and not torch.isnan(found[0][1]).any() and not torch.isnan(found[1]).any()
    constant = ToyExecutor("toy:vocab=6,constant=3")  # fault E11's draft
    [logits] = constant.extend([Extension(constant.open(), [0, 4], 2)])
    assert (logits.softmax(-1)[:, 3] == 1).all()


def test_vocabulary_maps_any_text():
    _, words = load("toy:vocab=40,eos=0")
    tokenizer = Tokenizer.from_buffer(words.tokenizer_json)
    assert words.eos_ids == (0,) and words.size == 40 and len(list(words.pairs)) == 40
    text = "hi there 42"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("漢\n").ids == [1, 1]  # unknown: the lowest id that ends nothing
    assert tokenizer.encode("b</s>").ids[-1] == 0
    assert tokenizer.decode([1, 0, 2]) == "bc"


def test_the_largest_vocabulary_has_a_character_for_each_token():
    _, words = load("toy:vocab=50000,order=0")
    assert words.size == len(list(words.pairs)) == 50_000
    tokenizer = Tokenizer.from_buffer(words.tokenizer_json)
    ids = [0, 66, 67, 21_058, 21_059, 40_000, 49_999]  # (both sides of each range's edge)
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids


def test_permuted_names_are_another_vocabulary_of_the_same_size():
    """Fault A3's pair."""
    (_, one), (_, other) = load("toy:vocab=9"), load("toy:vocab=9,names=permuted")
    assert one.size == other.size and list(one.pairs) != list(other.pairs)
    assert {text for _, text in one.pairs} == {text for _, text in other.pairs}


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("toy:vocabulary=3", "has no option 'vocabulary'"),
        ("toy:vocab=x", "vocab='x' is not of type int"),
        ("toy:vocab=3,vocab=4", "twice"),
        ("toy:vocab=0", "vocab must be 1 to"),
        ("toy:vocab=50000,order=2", "table must hold"),
        ("toy:temperature=0", "temperature must be above 0"),
        ("toy:temperature=nan", "temperature must be above 0"),
        ("toy:state=x", "state must be"),
        ("toy:fail_load=1", "asked to fail"),
    ],
)
def test_bad_references_are_one_line(reference, text):
    with pytest.raises(ModelError, match=text) as caught:
        load(reference)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "status"), [("die_after=2", 17), ("fail_load=2", 3), ("hang_after=2", None), ("delay_ms=1", 0)]
)
def test_failures_on_request(option, status):
    program = (
        "from execution import Extension, load\n"
        f"model, _ = load('toy:vocab=4,{option}')\n"
        "row = model.open()\n"
        "model.extend([Extension(row, [1], 1)]); print('first', flush=True)\n"
        "model.extend([Extension(row, [1], 1)]); print('second', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if status != 3:
            assert process.stdout.readline() == "first\n"
        if status is None:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            process.kill()
        else:
            assert process.wait(timeout=60) == status
            assert (process.stdout.readline() == "second\n") == (status == 0)


@pytest.mark.parametrize("state", ["table", "hash"])
def test_a_fork_goes_on_as_its_row_would_have(state):
    executor = ToyExecutor(f"toy:vocab=7,order=2,seed=2,state={state}")
    row, straight = executor.open(), executor.open()
    executor.extend([Extension(row, [1, 2, 3, 4, 5], 0), Extension(straight, [1, 2, 3], 0)])
    want = executor.extend([Extension(straight, [6, 0, 6], 3)])[0]
    forks = [executor.fork(row, 3) for _ in range(20)]  # more slots than there were
    assert len({row, straight, *forks}) == 22 and [executor.length(fork) for fork in forks] == [3] * 20
    assert executor.length(row) == 5
    for found in executor.extend([Extension(fork, [6, 0, 6], 3) for fork in forks]):
        assert torch.equal(found, want)
    whole = executor.fork(row, 5)
    executor.truncate(row, 1)  # the fork keeps what the row gives up
    executor.close(row)
    deeper = executor.fork(forks[0], 6)
    executor.close(forks[0])
    reused = executor.open()  # a closed row's slot
    executor.extend([Extension(reused, [3] * 6, 0)])
    for fork, text in ((whole, [1, 2, 3, 4, 5]), (deeper, [1, 2, 3, 6, 0, 6]), (executor.fork(whole, 0), [])):
        solo = executor.open()
        [expected] = executor.extend([Extension(solo, [*text, 4, 4], 2)])
        assert torch.equal(executor.extend([Extension(fork, [4, 4], 2)])[0], expected)


def test_forks_that_cannot_be_change_nothing():
    executor = ToyExecutor("toy:vocab=7")
    row = executor.open()
    executor.extend([Extension(row, [1, 2], 0)])
    for bad, length, text in (
        (row, 3, "first 3 tokens: it holds 2"),
        (row, -1, "first -1"),
        (9, 0, "row 9: is not open"),
    ):
        with pytest.raises(RowError, match=text):
            executor.fork(bad, length)
    assert executor.length(row) == 2 and executor.open() == row + 1


def test_hashes_of_pieces_equal_those_of_the_plain_recurrence():
    executor, rng = ToyExecutor("toy:vocab=7,order=0,state=hash"), random.Random(1)
    texts = {executor.open(): [] for _ in range(4)}
    for _ in range(20):
        batch = []
        for row in rng.sample(sorted(texts), 3):
            fresh = [rng.randrange(7) for _ in range(rng.choice((0, 1, 2, 70)))]
            texts[row] += fresh
            batch.append(Extension(row, fresh, 0))
        executor.extend(batch)
    for row, text in texts.items():
        value, found = 0, [0]
        for token in text:
            value = (value * 6364136223846793005 + token + 1) % 2**64
            found.append(value)
        assert executor._hashes[executor._slots[row], : len(text) + 1].astype("uint64").tolist() == found
