"""A byte-level tokenizer of any size for models without a trained one: grammars and markers work on it too.

Its tokens are the 256 bytes, what JSON is made of, and random words, half of them with the space before them, so that
a grammar's masks are about as dense as over a trained vocabulary. Texts encode to bytes; ids decode to words.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MARKERS = ("<|end_of_text|>", "<|end_of_turn|>", "<think>", "</think>")
STOP, START, END = MARKERS[1:]

_JSON = ('":', '","', '":"', '"}', '{"', '["', '"]', "},", "],", "},{", "[]", "{}", "Ġ{", "Ġ[", 'Ġ"', ':"', "00", "10")
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def write_tokenizer(folder: Path, vocab: int, seed: int = 0) -> Path:
    """Write tokenizer.json and tokenizer_config.json with exactly ``vocab`` ids, the markers last. Returns the folder.

    Raises ValueError for a vocabulary too small to hold the bytes, the JSON tokens and the markers.
    """
    words = require_room(vocab)
    fixed = _fixed()
    tokens = [*fixed, *islice(_words(seed, set(fixed)), words)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in MARKERS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP, "pad_token": MARKERS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def require_room(vocab: int) -> int:
    """Return how many ids are left for words. Raises ValueError as ``write_tokenizer`` does."""
    needed = len(_fixed()) + len(MARKERS)
    if vocab < needed:
        raise ValueError(f"vocab: at least {needed} ids are needed, got {vocab}")
    return vocab - needed


def _fixed() -> list[str]:
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_JSON]


def _words(seed: int, taken: set[str]) -> Iterator[str]:
    draw = Random(seed)
    while True:
        word = draw.choice(("", "Ġ")) + "".join(draw.choices(_LETTERS, k=draw.randint(2, 8)))
        if word not in taken:
            taken.add(word)
            yield word
