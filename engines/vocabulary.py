"""What every token id spells, in bytes: all that a grammar needs to know about a tokenizer."""

import hashlib
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby, takewhile
from typing import Any

from tandemrt.engines.control_tokens import control_tokens
from tandemrt.engines.errors import BadBundle, quoted

CONTROL = 256  # among symbols, the first that is no byte


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of every id of the logits; control tokens and padding spell nothing.

    A token that spells nothing is unknown to every grammar, so it cannot appear inside a JSON string. A text with
    control tokens in it is a sequence of *symbols*: bytes, and ``CONTROL + id`` for a token that spells nothing.
    """

    tokens: tuple[bytes, ...] = field(repr=False)
    special: frozenset[int] = field(repr=False)  # control tokens: in the tokenizer, but not text
    valid_tokens: int  # ids from here on are padding of the logits
    encode: Callable[[str], list[int]] | None = field(default=None, repr=False)  # the tokenizer's own, plain text

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the bytes of every token."""
        digest = hashlib.sha256(array("Q", map(len, self.tokens)).tobytes())
        digest.update(b"".join(self.tokens))
        return digest.hexdigest()

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
    def derived(self) -> dict[Any, Any]:
        """What others made of this vocabulary, for as long as it is there."""
        return {}

    def symbols(self, token: int) -> Sequence[int]:
        """What one token spells, at least one symbol."""
        return self.tokens[token] or (CONTROL + token,)

    def spelled(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """What several tokens spell, in symbols."""
        return tuple(symbol for token in tokens for symbol in self.symbols(token))

    def spell(self, symbols: Sequence[int], avoid: Collection[int] = ()) -> list[int] | None:
        """Tokens that spell ``symbols``, none of those to ``avoid`` among them; None if there are none.

        Each is the longest there is, so only a vocabulary without a token for every byte may miss a way.
        """
        found: list[int] = []
        for is_text, run in groupby(symbols, key=lambda symbol: symbol < CONTROL):
            if not is_text:
                found += [symbol - CONTROL for symbol in run]
                continue
            text = bytes(run)
            tokens = self.longest_first(text, avoid)
            if sum(len(self.tokens[token]) for token in tokens) < len(text):
                return None
            found += tokens
        return None if any(token in avoid for token in found) else found

    def beginning_with(self, symbols: Sequence[int]) -> list[int]:
        """The tokens whose symbols begin with these, or are these."""
        if symbols[0] >= CONTROL:
            return [symbols[0] - CONTROL] if len(symbols) == 1 else []
        if max(symbols) >= CONTROL:
            return []
        text, (texts, ids) = bytes(symbols), self._sorted
        first = bisect_left(texts, text)
        last = bisect_left(texts, True, lo=first, key=lambda each: not each.startswith(text))
        return ids[first:last]

    def beginnings_of(self, symbols: Sequence[int]) -> list[int]:
        """The tokens that ``symbols`` begin with."""
        if symbols[0] >= CONTROL:
            return [symbols[0] - CONTROL]
        run = [*takewhile(lambda symbol: symbol < CONTROL, symbols)]
        text, (texts, ids) = bytes(run), self._sorted
        places = [range(bisect_left(texts, text[:n]), bisect_right(texts, text[:n])) for n in range(1, len(text) + 1)]
        return [ids[place] for each in places for place in each]

    def holding(self, symbols: Sequence[int]) -> list[int]:
        """The tokens that hold ``symbols`` anywhere."""
        if max(symbols) >= CONTROL:
            return [symbols[0] - CONTROL] if len(symbols) == 1 else []
        text = bytes(symbols)
        return [index for index, token in enumerate(self.tokens) if text in token]

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        ids = sorted((index for index, token in enumerate(self.tokens) if token), key=self.tokens.__getitem__)
        return [self.tokens[index] for index in ids], ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {token: index for index, token in reversed(list(enumerate(self.tokens))) if token}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)

    def longest_first(self, text: bytes, avoid: Collection[int] = ()) -> list[int]:
        """Tokens that spell ``text``, each the longest there is but those to ``avoid``, up to where none goes on."""
        tokens, at = [], 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            found = next((t for end in ends if (t := self._ids.get(text[at:end])) is not None and t not in avoid), None)
            if found is None:
                break
            tokens.append(found)
            at += len(self.tokens[found])
        return tokens


def vocabulary_from_tokenizer(backend: Any, vocab_size: int, writers: Iterable[str] = ()) -> Vocabulary:
    """Read the vocabulary of a tokenizer of ``tokenizers``; ``vocab_size`` is the width of the model's logits.

    ``writers`` are chat templates and markers, which say what is a control token (engines/control_tokens.py). Other
    added tokens are text.

    Raises:
        BadBundle: the tokenizer is wider than the logits, or a token is neither byte-level nor byte-fallback.
    """
    spell = _speller(backend.decoder.__getstate__().decode() if backend.decoder else "null")
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    special = frozenset(control_tokens(backend, writers))
    valid_tokens = max(vocabulary.values(), default=-1) + 1
    if not 0 < valid_tokens <= vocab_size:
        raise BadBundle(
            f"tokenizer: ids must be below the width of the logits ({vocab_size}), got {valid_tokens - 1}; "
            "use the tokenizer of the target's checkpoint"
        )
    tokens = [b""] * vocab_size
    for text, index in vocabulary.items():
        if index in added and index not in special:
            tokens[index] = _spell_added(spell, text)
        elif index not in special:
            tokens[index] = spell(text)

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    return Vocabulary(tuple(tokens), special, valid_tokens, encode)


def _spell_added(spell: Callable[[str], bytes], text: str) -> bytes:
    # Decoders take a token for text where it is not wholly in their alphabet.
    try:
        return spell(text)
    except BadBundle:
        return text.encode()


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
        return text.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        raise BadBundle(
            f"tokenizer: a decoder of kind ByteLevel needs tokens in its alphabet, got {quoted(text)}; "
            "add a token that is no text with add_tokens"
        ) from None


def _spell_byte_fallback(text: str) -> bytes:
    if _BYTE.fullmatch(text):
        return bytes([int(text[3:5], 16)])
    return text.replace("\u2581", " ").encode()


def _byte_level_table() -> dict[int, int]:
    # The byte alphabet of GPT-2: printable Latin-1 stands for itself, the rest is moved up from U+0100. What is moved
    # is no letter of the alphabet where it was, and becomes one that Latin-1 cannot encode.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(moved, 0xFFFF) | {0x100 + index: byte for index, byte in enumerate(moved)}


_BYTES = _byte_level_table()
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
