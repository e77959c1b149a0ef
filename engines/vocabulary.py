"""What every token id spells, in bytes: all that a grammar needs to know about a tokenizer."""

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

from tandemrt.engines.errors import BadBundle, quoted


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of every id of the logits; control tokens and padding spell nothing.

    A token that spells nothing is unknown to every grammar, so it cannot appear inside a JSON string.
    """

    tokens: tuple[bytes, ...]
    special: frozenset[int]  # control tokens: in the tokenizer, but not text
    valid_tokens: int  # ids from here on are padding of the logits
    encode: Callable[[str], list[int]] | None = field(default=None, compare=False)  # the tokenizer's own, plain text

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the bytes of every token."""
        digest = hashlib.sha256()
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()

    def beginning(self, text: bytes) -> list[int]:
        """All tokens whose bytes begin with ``text``, which is not empty."""
        first = bisect_left(self._sorted, (text, -1))
        found = []
        for spelled, token in islice(self._sorted, first, None):
            if not spelled.startswith(text):
                break
            found.append(token)
        return found

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((spelled, token) for token, spelled in enumerate(self.tokens) if spelled)

    def spelling(self, text: bytes) -> list[int]:
        """Tokens that spell ``text`` as the tokenizer would, which is how a model was taught to; else longest first."""
        return list(self._spellings(text))

    @cached_property
    def _spellings(self) -> Callable[[bytes], tuple[int, ...]]:
        return lru_cache(maxsize=1024)(self._spelled)  # grammars ask for the same few texts again and again

    def _spelled(self, text: bytes) -> tuple[int, ...]:
        try:
            found = self.encode(text.decode()) if self.encode else []
        except UnicodeDecodeError:  # it ends inside a character
            found = []
        spelled = b"".join(self.tokens[token] for token in found) == text
        return tuple(found if found and spelled else self.longest_first(text))

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {token: index for index, token in reversed(list(enumerate(self.tokens))) if token}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)

    def longest_first(self, text: bytes) -> list[int]:
        """Tokens that spell ``text``, each the longest there is, up to where none goes on."""
        tokens, at = [], 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                break
            tokens.append(self._ids[text[at:end]])
            at = end
        return tokens


def vocabulary_from_tokenizer(backend: Any, vocab_size: int) -> Vocabulary:
    """Read the vocabulary of a tokenizer of ``tokenizers``; ``vocab_size`` is the width of the model's logits.

    Every added token counts as a control token, whether the tokenizer calls it special or not: reasoning markers and
    tool-call openers often are not.

    Raises:
        BadBundle: the tokenizer is wider than the logits, or a token is neither byte-level nor byte-fallback.
    """
    spell = _speller(json.dumps(json.loads(backend.to_str())["decoder"]))
    vocabulary = backend.get_vocab(with_added_tokens=True)
    special = frozenset(backend.get_added_tokens_decoder())
    valid_tokens = max(vocabulary.values(), default=-1) + 1
    if not 0 < valid_tokens <= vocab_size:
        raise BadBundle(
            f"tokenizer: ids must be below the width of the logits ({vocab_size}), got {valid_tokens - 1}; "
            "use the tokenizer of the target's checkpoint"
        )
    tokens = [b""] * vocab_size
    for text, index in vocabulary.items():
        if index not in special:
            tokens[index] = spell(text)

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    return Vocabulary(tuple(tokens), special, valid_tokens, encode)


def _speller(decoder: str) -> Callable[[str], bytes]:
    if '"ByteLevel"' in decoder:
        return _spell_byte_level
    if '"ByteFallback"' in decoder:
        return _spell_byte_fallback
    raise BadBundle(
        f"tokenizer: its decoder must be ByteLevel or ByteFallback to spell tokens in bytes, got {quoted(decoder)}"
    )


def _spell_byte_level(text: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in text])
    except KeyError:
        raise BadBundle(
            f"tokenizer: a decoder of kind ByteLevel needs tokens in its alphabet, got {quoted(text)}; "
            "add a token that is no text with add_tokens"
        ) from None


def _spell_byte_fallback(text: str) -> bytes:
    if _BYTE.fullmatch(text):
        return bytes([int(text[3:5], 16)])
    return text.replace("\u2581", " ").encode()


def _byte_level_table() -> dict[str, int]:
    # The byte alphabet of GPT-2: printable Latin-1 stands for itself, the rest is moved up from U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(moved)}


_BYTES = _byte_level_table()
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
