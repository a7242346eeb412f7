"""The vocabulary of a toy model: one character a token, in a real `tokenizers` tokenizer. Imports tokenizers."""

from __future__ import annotations

import string
from itertools import chain, islice

from execution.toy_spec import ToySpec
from execution.vocabulary import Vocabulary

_FIRST = string.ascii_lowercase + string.digits + " " + string.ascii_uppercase + ".,!?\n"
# Further tokens are CJK ideographs, then Hangul syllables: printable, one character each, no whitespace, no combining.
_RANGES = (range(0x4E00, 0xA000), range(0xAC00, 0xD7A4), range(0x20000, 0x2A6E0))


def toy_texts(spec: ToySpec) -> list[str]:
    """The text of each id below `vocab`. With names=permuted they are shifted by one."""
    texts = list(islice(chain(_FIRST, map(chr, chain(*_RANGES))), spec.vocab))
    if spec.names == "permuted":
        texts = texts[1:] + texts[:1]
    if spec.eos >= 0:
        texts[spec.eos] = "</s>"
    return texts


def toy_vocabulary(spec: ToySpec) -> Vocabulary:
    """Any text maps to ids: a character without a token becomes the lowest id that is not the end of sequence."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    texts = toy_texts(spec)
    unknown = texts[1] if spec.eos == 0 and len(texts) > 1 else texts[0]
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if spec.eos >= 0:
        tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    eos_ids = (spec.eos,) if spec.eos >= 0 else ()
    return Vocabulary(tokenizer.to_str().encode(), "", eos_ids)
