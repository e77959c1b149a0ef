"""The vocabulary of a tokenizer: the bytes of every token id, for grammars and constraints."""

import hashlib
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import accumulate, groupby, takewhile
from typing import Any

from tandemrt.engines.text.control_tokens import control_tokens
from tandemrt.engines.validation.errors import BadBundle, quoted

CONTROL = 256  # the first symbol that is not a byte


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of every token id of the logits. Control tokens and padding have none.

    Grammars do not allow a token without bytes, so it cannot appear inside a JSON string. A text with control tokens is
    a sequence of *symbols*: bytes, and ``CONTROL + id`` for a token without bytes.
    """

    tokens: tuple[bytes, ...] = field(repr=False)
    special: frozenset[int] = field(repr=False)  # control tokens: in the tokenizer, without bytes
    valid_tokens: int  # one past the tokenizer's largest id; ids from here on are padding
    # The tokenizer's, for text without control tokens.
    encode: Callable[[str], list[int]] | None = field(default=None, repr=False)
    control: Mapping[str, int] = field(default_factory=dict, repr=False)  # text of a control token -> id

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the bytes of every token."""
        digest = hashlib.sha256(array("Q", map(len, self.tokens)).tobytes())
        digest.update(b"".join(self.tokens))
        return digest.hexdigest()

    def tokenize(self, text: bytes) -> list[int]:
        """Return the tokenizer's tokens for ``text``, as the model was trained, else the longest tokens first."""
        return list(self._tokenize(text))

    @cached_property
    def _tokenize(self) -> Callable[[bytes], tuple[int, ...]]:
        return lru_cache(maxsize=1024)(self._tokenize_once)  # grammars request few texts, many times

    def _tokenize_once(self, text: bytes) -> tuple[int, ...]:
        try:
            encoded = self.encode(text.decode()) if self.encode else []
        except UnicodeDecodeError:  # the text ends inside a character
            encoded = []
        matches = b"".join(self.tokens[token] for token in encoded) == text
        return tuple(encoded if encoded and matches else self.greedy_tokens(text))

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """Values that other modules derive from this vocabulary, with its lifetime."""
        return {}

    def symbols(self, token: int) -> Sequence[int]:
        """Return the symbols of one token, at least one."""
        return self.tokens[token] or (CONTROL + token,)

    def symbols_of(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """Return the symbols of several tokens."""
        return tuple(symbol for token in tokens for symbol in self.symbols(token))

    def tokenize_symbols(self, symbols: Sequence[int], avoid: Collection[int] = ()) -> list[int] | None:
        """Return tokens with these ``symbols``, without tokens to ``avoid``; None if no such tokens are found.

        The search takes the longest token at each place. It may miss a solution only in a vocabulary without tokens
        for all bytes.
        """
        result: list[int] = []
        for is_text, run in groupby(symbols, key=lambda symbol: symbol < CONTROL):
            if not is_text:
                result += [symbol - CONTROL for symbol in run]
                continue
            text = bytes(run)
            tokens = self.greedy_tokens(text, avoid)
            if sum(len(self.tokens[token]) for token in tokens) < len(text):
                return None
            result += tokens
        return None if any(token in avoid for token in result) else result

    def tokens_with_prefix(self, symbols: Sequence[int]) -> list[int]:
        """Return the tokens whose symbols start with ``symbols``."""
        if symbols[0] >= CONTROL:
            return [symbols[0] - CONTROL] if len(symbols) == 1 else []
        if max(symbols) >= CONTROL:
            return []
        text, (texts, ids) = bytes(symbols), self._sorted
        first = bisect_left(texts, text)
        last = bisect_left(texts, True, lo=first, key=lambda each: not each.startswith(text))
        return ids[first:last]

    def tokens_that_prefix(self, symbols: Sequence[int]) -> list[int]:
        """Return the tokens whose symbols are a prefix of ``symbols``."""
        if symbols[0] >= CONTROL:
            return [symbols[0] - CONTROL]
        run = [*takewhile(lambda symbol: symbol < CONTROL, symbols)]
        text, (texts, ids) = bytes(run), self._sorted
        places = [range(bisect_left(texts, text[:n]), bisect_right(texts, text[:n])) for n in range(1, len(text) + 1)]
        return [ids[place] for each in places for place in each]

    def tokens_containing(self, symbols: Sequence[int]) -> list[int]:
        """Return the tokens whose symbols contain ``symbols``."""
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

    def greedy_tokens(self, text: bytes, avoid: Collection[int] = ()) -> list[int]:
        """Return the longest tokens for ``text``, one after the other, without those to ``avoid``.

        The result covers less than ``text`` if no token continues it.
        """
        tokens, at = [], 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            longest = next(
                (t for end in ends if (t := self._ids.get(text[at:end])) is not None and t not in avoid), None
            )
            if longest is None:
                break
            tokens.append(longest)
            at += len(self.tokens[longest])
        return tokens


def vocabulary_from_tokenizer(backend: Any, vocab_size: int, writers: Iterable[str] = ()) -> Vocabulary:
    """Read the vocabulary of a tokenizer of the library ``tokenizers``.

    ``vocab_size`` is the width of the model's logits. An added token is a control token if it is special or occurs in
    ``writers``, which are chat templates and delimiters (engines/text/control_tokens.py); else it is text.

    Raises:
        BadBundle: the tokenizer is wider than the logits, its decoder does not fit its tokens, or a token is neither
            byte-level nor byte-fallback.
    """
    _require_fitting_decoder(backend)
    bytes_of = _bytes_function(backend)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    control = control_tokens(backend, writers)
    special = frozenset(control)
    valid_tokens = max(vocabulary.values(), default=-1) + 1
    if not 0 < valid_tokens <= vocab_size:
        raise BadBundle(
            f"tokenizer: ids must be below the width of the logits ({vocab_size}), got {valid_tokens - 1}; "
            "use the tokenizer of the target's checkpoint"
        )
    tokens = [b""] * vocab_size
    ordinary = {text: index for text, index in vocabulary.items() if index not in added and index not in special}
    for index, content in zip(ordinary.values(), _bytes_of_all(bytes_of, list(ordinary)), strict=True):
        tokens[index] = content
    for index, token in added.items():
        if index not in special:
            tokens[index] = _added_bytes(bytes_of, token.content)

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    names = {token.content: index for index, token in control.items()}
    return Vocabulary(tuple(tokens), special, valid_tokens, encode, names)


def _require_fitting_decoder(backend: Any) -> None:
    """Raise BadBundle for byte-level tokens with another decoder, which would leave their alphabet in every text."""
    text = backend.decode(backend.encode("a b", add_special_tokens=False).ids)
    if _BLANK in text:
        raise BadBundle(
            f"tokenizer: its tokens are byte-level, so its decoder must be ByteLevel, got one that reads 'a b' as "
            f"{quoted(text)}; save the tokenizer with that decoder"
        )


def token_decoder(backend: Any) -> Callable[[str], bytes]:
    """Return the function from a token of a tokenizer of the library ``tokenizers`` to its bytes."""
    return partial(_added_bytes, _bytes_function(backend))


def _bytes_function(backend: Any) -> Callable[[str], bytes]:
    return _byte_decoder(backend.decoder.__getstate__().decode() if backend.decoder else "null")


def _bytes_of_all(bytes_of: Callable[[str], bytes], texts: Sequence[str]) -> list[bytes]:
    if bytes_of is not _byte_level_bytes:
        return [bytes_of(text) for text in texts]
    try:
        joined = _byte_level_bytes("".join(texts))  # at once: a vocabulary has 100,000 tokens
    except BadBundle:
        return [bytes_of(text) for text in texts]  # raises for the token that has no bytes
    ends = list(accumulate(map(len, texts)))  # each character stands for a byte
    return [joined[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _added_bytes(bytes_of: Callable[[str], bytes], text: str) -> bytes:
    # Decoders treat a token as text if a character is not in their alphabet.
    try:
        return bytes_of(text)
    except BadBundle:
        return text.encode()


def _byte_decoder(decoder: str) -> Callable[[str], bytes]:
    if '"ByteLevel"' in decoder:
        return _byte_level_bytes
    if '"ByteFallback"' in decoder:
        return _byte_fallback_bytes
    raise BadBundle(
        f"tokenizer: its decoder must be ByteLevel or ByteFallback, got {quoted(decoder)}; use another tokenizer"
    )


def _byte_level_bytes(text: str) -> bytes:
    try:
        return text.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        raise BadBundle(
            f"tokenizer: with the decoder ByteLevel, tokens must be in its alphabet, got {quoted(text)}; "
            "add a token that is not text with add_tokens"
        ) from None


def _byte_fallback_bytes(text: str) -> bytes:
    if _BYTE.fullmatch(text):
        return bytes([int(text[3:5], 16)])
    return text.replace("\u2581", " ").encode()


def _byte_level_table() -> dict[int, int]:
    # The byte alphabet of GPT-2: printable Latin-1 characters are themselves, other bytes are moved to U+0100 and up.
    # The original characters of moved bytes are not in the alphabet: they map to U+FFFF, which Latin-1 rejects.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(moved, 0xFFFF) | {0x100 + index: byte for index, byte in enumerate(moved)}


_BYTES = _byte_level_table()
_BLANK = "\u0120"  # a blank in that alphabet
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
