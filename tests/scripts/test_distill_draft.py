"""The distillation tool on a tiny random Llama: corpus, training, interruptions, checkpoint, refusals."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import distill_draft  # noqa: E402
from distill.corpus import ASSISTANT, NOBODY, USER, Corpus, CorpusSpec  # noqa: E402
from distill.evaluate import evaluate  # noqa: E402
from distill.student import Shape, build_student, load_student  # noqa: E402
from distill.target import load_target  # noqa: E402
from distill.train import LogProbabilities  # noqa: E402
from distill.writer import Recipe, Writer  # noqa: E402

CPU = torch.device("cpu")
TOKENS = ["<|im_start|>", "<|im_end|>", "user", "assistant", "system", "\n", " ", *"abcdefghijklmnopqrstuvwxyz"]
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nhi<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a chat template, peaked enough that there is something to learn."""
    folder = tmp_path_factory.mktemp("tiny")
    backend = Tokenizer(models.WordLevel({text: index for index, text in enumerate(TOKENS)}, unk_token=" "))
    words = Regex(r"<\|im_start\|>|<\|im_end\|>|user|assistant|system|\n|.")
    backend.pre_tokenizer = pre_tokenizers.Split(words, "isolated")
    backend.add_special_tokens(TOKENS[:2])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=TOKENS[1], bos_token=TOKENS[0], chat_template=TEMPLATE
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(tiny: Path, out: Path, *more: str) -> Result:
    """The command, in this process, so that its real signal handlers run."""
    fixed = ["--corpus-tokens", "6000", "--length", "48", "--rows", "32", "--layers", "2", "--steps", "60"]
    base = ["--target", str(tiny), "--out", str(out), *fixed, "--batch-tokens", "512", "--threads", "1", *more]
    return CliRunner().invoke(distill_draft.main, base)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, title: str, update: int) -> None:
    """Send this process a SIGTERM when phase `title` reports for the `update`-th time."""
    counts = {title: 0}
    usual = distill_draft.Reporter.update

    def counting(reporter: Any, share: float, text: str) -> None:
        usual(reporter, share, text)
        if reporter.title == title:
            counts[title] += 1
            if counts[title] == update:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(distill_draft.Reporter, "update", counting)


def test_interrupted_in_each_phase_it_resumes_and_alpha_rises(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    work = tmp_path / "draft.work"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, "corpus", 40)
        first = run(tiny, out)
    assert first.exit_code == 1 and "interrupted; the corpus is kept" in first.stderr
    kept = Corpus(work / "corpus").tokens
    assert 0 < kept < 6000
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, "training", 20)
        second = run(tiny, out)
    assert second.exit_code == 1 and "interrupted; the training state is kept" in second.stderr
    assert Corpus(work / "corpus").tokens >= 6000
    assert not out.exists()
    third = run(tiny, out)
    assert third.exit_code == 0, third.stderr
    assert "resumed at step 20" in third.stderr
    said = json.loads((out / "config.json").read_text())["specdec"]
    assert (said["head"], said["embedding"], said["training"]["steps"]) == ("full", "own", 60)

    target, corpus = load_target(str(tiny), torch.float32, CPU), Corpus(work / "corpus")
    untrained = build_student(target.model, Shape(2, 0, False), None)
    everything = Corpus(work / "corpus", held_every=1)  # so small a corpus holds out too few chats to tell
    before, after = (evaluate(target.model, student, everything) for student in (untrained, load_student(out)))
    assert after.alpha_1 > before.alpha_1 + 0.05 and after.alpha_0 > before.alpha_0
    assert {"alpha_1", "alpha_1_wire", "alpha_0"} <= set(said["training"]["held_out"])
    assert corpus.training and not set(corpus.training) & set(corpus.held_out)

    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = torch.arange(12)[None]
    again = load_student(out).causal(input_ids=tokens).logits
    torch.testing.assert_close(plain(input_ids=tokens).logits, again)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == target.tokenizer.get_vocab()


def test_reduced_head_and_shared_embedding_load_in_the_runtime(tiny: Path, tmp_path: Path) -> None:
    from execution.draft_checkpoint import load_draft

    out = tmp_path / "draft"
    result = run(tiny, out, "--head", "12", "--embedding", "shared", "--steps", "3", "--corpus-tokens", "1500")
    assert result.exit_code == 0, result.stderr
    target = load_target(str(tiny), torch.float32, CPU)
    embedding = target.model.get_input_embeddings().weight
    network, head_ids = load_draft(out, "draft", torch.float32, CPU, lambda: embedding)
    student = load_student(out, embedding)
    assert head_ids is not None and student.head_ids is not None
    assert head_ids.tolist() == student.head_ids.tolist() and len(head_ids) == 12
    tokens = torch.arange(12)[None]
    scores = student.logits(tokens, torch.arange(12))
    torch.testing.assert_close(network(input_ids=tokens).logits[0], scores)
    wide = student.spread(scores)
    assert wide.shape == (12, len(TOKENS)) and int(wide.isfinite().sum()) == 12 * 12
    assert not (out / "tokenizer.json").exists()


def test_a_corpus_that_grew_leaves_the_head_as_it_was(tiny: Path, tmp_path: Path) -> None:
    """The rows of a half-trained head belong to its ids, however a longer corpus would rank them."""
    out, work = tmp_path / "draft", tmp_path / "draft.work"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, "training", 2)
        assert run(tiny, out, "--head", "7", "--steps", "4", "--corpus-tokens", "400").exit_code == 1
    before = torch.load(work / "training.pt", weights_only=True)["head_ids"]
    likeliest = distill_draft.likeliest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill_draft, "likeliest", lambda mass, count: likeliest(-mass, count))
        other = run(tiny, out, "--head", "8", "--steps", "4", "--corpus-tokens", "900")
        assert other.exit_code == 2 and "delete it to train anew" in other.stderr
        assert run(tiny, out, "--head", "7", "--steps", "4", "--corpus-tokens", "900").exit_code == 0
    assert load_file(out / "model.safetensors")["head_ids"].tolist() == before.tolist()


@pytest.fixture(scope="module")
def written(tiny: Path) -> tuple[Any, list[Any]]:
    """The target and the chats of a few hundred steps, many of them begun in a row that held another before."""
    target = load_target(str(tiny), torch.float32, CPU)
    spec = CorpusSpec(str(tiny), target.vocab_size, 40, 33, 0)
    with torch.inference_mode():
        writer = Writer(target, spec, Recipe(rows=48, user_tokens=6, user_temperatures=((1.0, 1.0),)), 0)
        chats = [chat for _ in range(200) for chat in writer.step()]
    return target, chats + writer.unfinished()


def test_the_distributions_are_those_of_a_plain_forward(written: tuple[Any, list[Any]]) -> None:
    target, chats = written
    for chat in chats[:: len(chats) // 40]:
        logits = target.model(input_ids=torch.from_numpy(chat.tokens.astype(np.int64))[None]).logits[0]
        at = (chat.roles != NOBODY).nonzero()[0]
        plain = torch.log_softmax(logits, -1)[at].gather(1, torch.from_numpy(chat.ids[at].astype(np.int64)))
        np.testing.assert_allclose(plain.numpy(), chat.logp[at].astype(np.float32), atol=0.01)


def test_chats_follow_the_template_and_their_temperature(written: tuple[Any, list[Any]]) -> None:
    target, chats = written
    shape = target.chat
    assert len(shape.openings) == 2 and shape.openings[1] == (0, TOKENS.index("user"), TOKENS.index("\n"))
    for chat in chats:
        tokens = tuple(int(token) for token in chat.tokens)
        assert any(tokens[: len(opening)] == opening for opening in shape.openings)
        user, assistant = (chat.roles == USER).nonzero()[0], (chat.roles == ASSISTANT).nonzero()[0]
        assert len(user) <= 6
        if len(assistant):
            start = int(assistant[0]) + 1
            assert tokens[start - len(shape.turn_end) : start] == shape.turn_end
        if chat.temperature == 0:
            assert all(chat.ids[at, 0] == chat.tokens[at + 1] for at in assistant if at + 1 < len(tokens))


def test_temperature_one_is_sampled_by_the_targets_law(written: tuple[Any, list[Any]]) -> None:
    """Surprisal minus entropy at each drawn token has mean 0 under the law; a biased sampler drifts."""
    _, chats = written
    drifts = []
    for chat in chats:
        for at in (chat.roles == USER).nonzero()[0]:
            logp = chat.logp[at].astype(np.float64)
            drawn = logp[chat.ids[at] == chat.tokens[at + 1]][0]
            drifts.append(-drawn + (np.exp(logp) * logp).sum())
    drift = np.array(drifts)
    assert len(drift) > 500
    assert abs(drift.mean()) < 4 * drift.std() / len(drift) ** 0.5


def test_gradient_of_log_probabilities_is_that_of_log_softmax() -> None:
    torch.manual_seed(0)
    scores = torch.randn(5, 11, requires_grad=True)
    columns = torch.randint(0, 11, (5, 4))
    ours = LogProbabilities.apply(scores, columns)
    plain = torch.log_softmax(scores, -1).gather(1, columns)
    torch.testing.assert_close(ours, plain)
    found, wanted = (torch.autograd.grad(value.square().sum(), scores)[0] for value in (ours, plain))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--head", "1000"], "larger than the target's vocabulary of 33"),
        (["--head", "none"], "neither 'full' nor a number"),
        (["--layers", "9"], "the target has 4 layers"),
        (["--device", "nonsense"], "is not usable"),
        (["--target", "/nowhere/at-all"], "no such file or folder"),
        (["--out", "/proc/nowhere/draft"], "cannot write to"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tiny: Path, tmp_path: Path, more: list[str], said: str) -> None:
    result = run(tiny, tmp_path / "draft", *more)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()[-1]) < 400


def test_a_corpus_of_other_settings_is_refused(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    assert run(tiny, out, "--steps", "1", "--corpus-tokens", "500").exit_code == 0
    result = run(tiny, out, "--steps", "1", "--corpus-tokens", "9000", "--length", "64")
    assert result.exit_code == 2 and "choose another --work folder" in result.stderr
