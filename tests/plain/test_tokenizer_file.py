"""The tokenizer.json of a bundle means what the checkpoint's does."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tandemrt.export.bundle.tokenizer_file import quick_form

PAIRS = [("a", "b"), ("ab", "\u0120c"), ("\u2581", "\u00e9"), ('"', "\\")]


def tokenizer_json(pairs: list[tuple[str, str]], **model: Any) -> bytes:
    parts = dict.fromkeys(each for pair in pairs for each in (*pair, "".join(pair)))
    tokenizer = Tokenizer(models.BPE({each: at for at, each in enumerate(parts)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    content = json.loads(tokenizer.to_str())
    content["model"] |= model
    return json.dumps(content, indent=2).encode()


@pytest.mark.parametrize(
    ("pairs", "joined"),
    [(PAIRS, True), ([], True), ([*PAIRS, ("a b", "c")], False), ([*PAIRS, ("#version", "c")], False)],
    ids=["pairs", "none", "a space in a token", "a token like a comment"],
)
def test_a_bpe_tokenizer_keeps_its_meaning(pairs: list[tuple[str, str]], joined: bool) -> None:
    content = tokenizer_json(pairs)
    quick = quick_form(content)
    assert Tokenizer.from_buffer(quick).to_str() == Tokenizer.from_buffer(content).to_str()
    assert len(quick) < len(content)
    assert all(isinstance(merge, str if joined else list) for merge in json.loads(quick)["model"]["merges"])
    assert Tokenizer.from_buffer(quick_form(quick)).to_str() == Tokenizer.from_buffer(content).to_str()


@pytest.mark.parametrize(
    "content",
    [
        Tokenizer(models.Unigram([("a", -0.1), ("b", -2.3456789012345678)], 0)).to_str(pretty=True).encode(),
        tokenizer_json(PAIRS, vocab={"\ud800": 0}),
        b"[]",
        b'{"model": {"type": "BPE"}}',
        b"\xff",
        b"",
    ],
    ids=["scores", "half a character", "a list", "no merges", "no UTF-8", "nothing"],
)
def test_other_content_keeps_its_bytes(content: bytes) -> None:
    assert quick_form(content) == content
