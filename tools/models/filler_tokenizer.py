"""Write a byte-level tokenizer of any size, for models without a trained one.

Its tokens are the 256 bytes, JSON tokens, random words (half of them with a leading space) and the special tokens, so
that the masks of a grammar are about as dense as over a trained vocabulary. Texts encode to bytes; ids decode to words.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|end_of_text|>", "<|end_of_turn|>", "<think>", "</think>")
STOP, START, END = SPECIAL_TOKENS[1:]

_JSON = ('":', '","', '":"', '"}', '{"', '["', '"]', "},", "],", "},{", "[]", "{}", "Ġ{", "Ġ[", 'Ġ"', ':"', "00", "10")
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def write_tokenizer(folder: Path, vocab: int, seed: int = 0) -> Path:
    """Write tokenizer.json and tokenizer_config.json with exactly ``vocab`` ids, SPECIAL_TOKENS last.

    Returns the folder. Raises ValueError if the vocabulary is too small for bytes, JSON tokens and special tokens.
    """
    words = require_room(vocab)
    fixed = _fixed()
    tokens = [*fixed, *islice(_words(seed, set(fixed)), words)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP, "pad_token": SPECIAL_TOKENS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def require_room(vocab: int) -> int:
    """Return the number of ids for words. Raises ValueError as ``write_tokenizer`` does."""
    needed = len(_fixed()) + len(SPECIAL_TOKENS)
    if vocab < needed:
        raise ValueError(f"vocab: must be at least {needed}, got {vocab}")
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
