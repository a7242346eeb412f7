"""The real default target: fetched, converted, and equal to transformers' own way of running it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer

from execution import default_models, load
from execution.errors import ModelError
from execution.gguf_models import converted_folder
from execution.interface import Extension

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = ("What is the capital of France?", "Write a short poem about the sea.", "Count from 1 to 12, with commas.")
STRINGS = (
    "Hello, world!",
    " leading and  double  spaces ",
    "In 2024, 12.5 % of 1,000",
    "naïve café — “quotes”",
    "🙂👩‍👩‍👧 emoji",
    "漢字とかな 한국어",
    "tabs\tand\r\nlines\n\n\n",
    "<|im_start|>user\nhi<|im_end|>",
    "def f(x):\n    return x ** 2",
    "",
)


@pytest.fixture(scope="module")
def target():
    try:
        return load(default_models.TARGET, device="cpu", dtype="float32", threads=1)
    except ModelError as error:
        if "could not be fetched" in str(error):
            pytest.skip(f"the default target cannot be had here: {error}")
        raise


def chat(words, text):
    import jinja2

    template = jinja2.Environment().from_string(words.chat_template)
    text = template.render(messages=[{"role": "user", "content": text}], add_generation_prompt=True)
    return Tokenizer.from_buffer(words.tokenizer_json).encode(text).ids


def test_greedy_equals_generate(target):
    """32 tokens of three prompts, all rows in one batch, five tokens rolled back and sent again now and then."""
    from transformers import AutoModelForCausalLM

    executor, words = target
    folder = converted_folder(default_models.target_file(), default_models.TARGET)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [chat(words, text) for text in PROMPTS]
    rows = [executor.open() for _ in prompts]
    texts = [list(prompt) for prompt in prompts]
    logits = executor.extend([Extension(row, prompt, 1) for row, prompt in zip(rows, prompts, strict=True)])
    for step in range(32):
        for text, last in zip(texts, logits, strict=True):
            text.append(int(last[-1].argmax()))
        tails = [1] * len(rows)
        if step % 8 == 7:
            tails[step % 3] = 6
            row, text = rows[step % 3], texts[step % 3]
            executor.truncate(row, len(text) - 6)
        logits = executor.extend(
            [Extension(row, text[-tail:], 1) for row, text, tail in zip(rows, texts, tails, strict=True)]
        )
    for row in rows:
        executor.close(row)
    for prompt, text in zip(prompts, texts, strict=True):
        expected = plain.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
            max_new_tokens=32, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert text == expected[0].tolist()
    assert "Paris" in Tokenizer.from_buffer(words.tokenizer_json).decode(texts[0][len(prompts[0]) :])


def test_tokenizer_is_that_of_transformers(target):
    from transformers import AutoTokenizer

    _, words = target
    assert words.size == len(list(words.pairs)) == 49_152
    ours = Tokenizer.from_buffer(words.tokenizer_json)
    assert words.eos_ids == (ours.token_to_id("<|im_end|>"),)
    for text in STRINGS:
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    path = default_models.target_file()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    if len(theirs) != words.size:
        pytest.skip(f"this transformers finds {len(theirs)} tokens in the file that lists 49152")
    for text in STRINGS:
        assert ours.encode(text).ids == theirs(text)["input_ids"]
    assert words.chat_template == theirs.chat_template
    # The file's pre-tokenizer `smollm` sets digits apart before all else; transformers passes over that.
    assert ours.encode("a  2").tokens == ["a", "ĠĠ", "2"] != theirs.tokenize("a  2")


def test_second_start_converts_nothing(target):
    """And imports neither gguf nor the tokenizers of transformers."""
    program = (
        "import sys, torch, time\nbegin = time.process_time()\n"
        "from execution import load\nmodel, words = load('smollm2-135m-instruct', threads=1)\n"
        "assert words.size == model.vocab_size == 49152\n"
        "assert 'gguf' not in sys.modules and 'transformers.models.auto.tokenization_auto' not in sys.modules\n"
        "print(time.process_time() - begin)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert float(done.stdout) < 30  # of the processor; 2 s on an idle machine


def test_shipped_draft_shares_the_vocabulary(target):
    """Loads without the target's weights being read whole, and proposes from its head alone."""
    if not (default_models.Path(default_models.__file__).parent / "checkpoints" / "smollm2_135m_draft").is_dir():
        pytest.skip("the draft's weights are not in this checkout")
    draft, words = load(default_models.DRAFT, threads=1)
    assert words == target[1] and draft.vocab_size == target[0].vocab_size
    [logits] = draft.extend([Extension(draft.open(), chat(words, PROMPTS[0]), 1)])
    proposed = torch.isfinite(logits[0])
    assert logits.shape == (1, 49_152) and int(proposed.sum()) > 1000 and not torch.isnan(logits).any()
