"""The handshake's rules, as pure functions: versions, roles, vocabularies."""

from __future__ import annotations

import pytest

from protocol.errors import FailureCode, HandshakeError
from protocol.handshake import check_pair, check_supported, check_welcome, vocabulary_fingerprint
from protocol.limits import PROTOCOL_VERSION
from tests.protocol.support import welcome

TOKENS = [(0, "a"), (1, "b"), (2, "é")]
OTHER = vocabulary_fingerprint([(0, "b"), (1, "a"), (2, "é")])


def one_line(error: HandshakeError) -> str:
    assert "\n" not in str(error)
    return str(error)


def test_a_fitting_worker_passes() -> None:
    check_welcome(welcome("draft"), "draft")
    assert check_pair(welcome(), welcome("draft")).notes == ()


def test_another_version_is_refused() -> None:
    with pytest.raises(
        HandshakeError, match=rf"version 1 .*this side speaks {PROTOCOL_VERSION}: install the same release"
    ) as caught:
        check_welcome(welcome(protocol_version=1), "target", "tcp://h:1")
    assert caught.value.code is FailureCode.VERSION
    assert one_line(caught.value).startswith("tcp://h:1")


def test_another_role_is_refused() -> None:
    with pytest.raises(HandshakeError, match="is a draft worker, but a target worker is wanted: check"):
        check_welcome(welcome("draft"), "target")


def test_padded_vocabularies_match() -> None:
    """Faults A1 and A2: one tokenizer, 151936 beside 152064 logits."""
    for sizes in ((151_936, 152_064), (152_064, 151_936)):
        pair = check_pair(welcome(vocab_size=sizes[0]), welcome("draft", vocab_size=sizes[1]))
        assert "from 151936 on are never drafted" in pair.notes[0]


def test_permuted_vocabularies_of_one_size_are_refused() -> None:
    """Fault A3: they were accepted in silence, and the text was garbage."""
    with pytest.raises(HandshakeError, match="another vocabulary than the target") as caught:
        check_pair(welcome(vocabulary=vocabulary_fingerprint(TOKENS)), welcome("draft", vocabulary=OTHER))
    assert "choose a draft with the target's tokenizer" in one_line(caught.value)


def test_a_source_without_vocabulary_matches_anything() -> None:
    assert check_pair(welcome(), welcome("draft", source="ngram", vocabulary="", vocab_size=1)).notes == ()
    check_pair(welcome(vocabulary=""), welcome("draft"))


def test_another_context_length_is_reported_only() -> None:
    pair = check_pair(welcome(context_length=8_192), welcome("draft", context_length=2_048))
    assert pair.context_length == 2_048
    assert "holds 2048 tokens" in pair.notes[0]
    assert check_pair(welcome(context_length=2_048), welcome("draft", context_length=8_192)).notes == ()


def test_modes_and_codecs_must_be_offered() -> None:
    check_supported(welcome(), "coupled", "none")
    with pytest.raises(HandshakeError, match="does not offer --verify rejection: it offers coupled"):
        check_supported(welcome(verify_modes=("coupled",)), "rejection", "counts")
    with pytest.raises(HandshakeError, match="does not offer --codec dense: it offers nothing"):
        check_supported(welcome(codecs=()), "rejection", "dense")


def test_the_fingerprint_depends_on_ids_and_texts_alone() -> None:
    fingerprint = vocabulary_fingerprint(TOKENS)
    assert fingerprint == vocabulary_fingerprint(reversed(TOKENS))
    assert len(fingerprint) == 64
    others = (
        [(0, "b"), (1, "a"), (2, "é")],
        [(0, "a"), (1, "b")],
        [(0, "a"), (1, "b"), (3, "é")],
        [(0, "a"), (1, "b"), (2, "e")],
        [(0, "ab"), (1, ""), (2, "é")],
        [(0, ""), (1, "ab"), (2, "é")],
    )
    assert len({fingerprint, *(vocabulary_fingerprint(pairs) for pairs in others)}) == len(others) + 1


def test_no_text_can_pass_for_two_tokens() -> None:
    assert vocabulary_fingerprint([(0, "a\1\0\0\0b")]) != vocabulary_fingerprint([(0, "a"), (1, "b")])


def test_the_fingerprint_takes_any_text_and_no_id_twice() -> None:
    assert vocabulary_fingerprint([(0, "\ud800"), (1, "\0"), (2, "")])
    for pairs in ([(0, "a"), (0, "b")], [(-1, "a")]):
        with pytest.raises(ValueError, match="comes twice or is negative"):
            vocabulary_fingerprint(pairs)
