"""Prompt files, random prompts, and which of them a plan runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.bench.measure import PLAIN, SPECULATIVE, Work, make_plan
from orchestrator.bench.workload import choose, load_prompts, random_prompts, shipped_prompts
from orchestrator.errors import UsageError

CATEGORIES = {
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities", "translation",
    "summarization", "qa", "math_reasoning", "rag",
}  # fmt: skip


@pytest.fixture
def file_of(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_both_kinds_of_lines(file_of: Callable[[str], str]) -> None:
    """A Spec-Bench question gives its first turn and its category; a line separator inside a string is no line end."""
    question = {"question_id": 81, "category": "writing", "turns": ["first", "second"]}
    lines = [json.dumps(question), "", json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False)]
    found = load_prompts([file_of("\n".join(lines) + "\n")])
    assert [(one.text, one.category) for one in found] == [("first", "writing"), ("a\u2028b", "")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "prompts.jsonl:2: not JSON"),
        ('\n\n{"text": "a"}\n', "prompts.jsonl:3: expected"),
        ('{"turns": []}', "prompts.jsonl:1: expected"),
        ('{"turns": [3]}', "prompts.jsonl:1: expected"),
        ('{"prompt": "  "}', "prompts.jsonl:1: expected"),
        ('["a"]', "prompts.jsonl:1: expected"),
        ("\n", "holds no prompt"),
    ],
)
def test_bad_lines_are_named(file_of: Callable[[str], str], text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_prompts([file_of(text)])


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "ä"}'.encode("latin-1"))
    for name, said in (("nowhere.jsonl", "No such file"), ("latin.jsonl", "not UTF-8"), (".", "directory")):
        with pytest.raises(UsageError, match=said):
            load_prompts([str(tmp_path / name)])


def test_the_prompts_that_ship() -> None:
    """One or two of each of Spec-Bench's categories."""
    found = [one.category for one in shipped_prompts()]
    assert set(found) == CATEGORIES
    assert all(1 <= found.count(category) <= 2 for category in CATEGORIES)


def test_random_prompts_follow_their_seed() -> None:
    first, again, other = (random_prompts(40, 100, seed) for seed in (1, 1, 2))
    assert first == again != other
    lengths = {len(one.tokens) for one in first}
    assert min(lengths) >= 8 and max(lengths) <= 32 and len(lengths) > 10
    assert all(0 <= token < 100 for one in first for token in one.tokens)


def test_choosing_spreads_over_the_file() -> None:
    assert choose(range(10), 5) == [0, 2, 4, 6, 8]
    assert choose(range(3), 7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("prompts", "concurrency", "requests", "groups"),
    [(20, 1, None, 20), (3, 1, None, 5), (3, 8, None, 5), (41, 8, None, 6), (20, 4, 9, 3), (20, 8, 1, 1)],
)
def test_plan_runs_whole_groups(prompts: int, concurrency: int, requests: int | None, groups: int) -> None:
    work = [Work((index,), "") for index in range(prompts)]
    plan = make_plan(work, concurrency, requests, [PLAIN, SPECULATIVE])
    assert [len(group) for group in plan.groups] == [concurrency] * groups
    assert plan.batches == 2 * (groups + 1)
    if requests is None:
        assert {one for group in plan.groups for one in group} == set(work)
