"""Encode reasoning delimiters as the token ids that a model would most likely emit for their texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tandemrt.engines.bundle.manifest import Delimiter
from tandemrt.engines.text.tokenizer import open_tokenizer
from tandemrt.engines.text.vocabulary import CONTROL, Vocabulary
from tandemrt.engines.validation.errors import BadBundle, BadCheckpoint, BadRecipe, quoted


@dataclass(frozen=True)
class DelimiterEncoder:
    """Encodes texts with ``backend``, a tokenizer of ``tokenizers``; ``vocabulary`` has the bytes of its ids.

    The runtime finds a delimiter in a text by its bytes and control tokens, whichever tokens form it there. Its ids
    therefore only have to decode to its text, with each control token as one id.
    """

    backend: Any
    vocabulary: Vocabulary

    @classmethod
    def open(cls, folder: Path, size: int, delimiters: Sequence[str]) -> "DelimiterEncoder":
        """Open the tokenizer in ``folder``, with ``size`` ids, for these delimiters. Raises BadCheckpoint.

        A token with exactly the text of a delimiter is a control token.
        """
        try:
            tokenizer, vocabulary = open_tokenizer(folder, size, delimiters=delimiters)
        except BadBundle as error:
            raise BadCheckpoint(f"checkpoint {folder}: {error}") from error
        return cls(tokenizer.backend, vocabulary)

    def encode(self, key: str, text: str) -> Delimiter:
        """Return the ids of a delimiter's text, without the special tokens that an encoder adds around a text.

        ``key``: the recipe's field, for messages. Raises BadRecipe if the tokenizer changes the text, or has no token
        for some byte.
        """
        ids = self._encode(text)
        unknown = getattr(self.backend.model, "unk_token", None)
        decoded = self.backend.decode(ids, skip_special_tokens=False)
        if not ids or (unknown is not None and self.backend.token_to_id(unknown) in ids) or decoded != text:
            got = repr(decoded) if ids else "nothing"
            raise BadRecipe(
                f"{key}: the tokenizer cannot encode {quoted(text)}, it gives {got}; use a text it can encode"
            )
        # Some tokenizers insert a space before a text's first word, so also try the encoding after a line break.
        line = self._encode("\n")
        after_newline = self._encode("\n" + text)
        ways = [ids, after_newline[len(line) :] if after_newline[: len(line)] == line else [], self._part_by_part(text)]
        exact = next((way for way in ways if self._text(way) == text.encode()), None)
        if exact is None:
            raise BadRecipe(f"{key}: the tokenizer has no tokens for {quoted(text)}; use a text it can encode")
        if self._missing_byte is not None and any(self.vocabulary.tokens[token] for token in exact):
            raise BadRecipe(
                f"{key}: a delimiter that is text needs a tokenizer with a token for every byte, there is none for "
                f"{self._missing_byte}; got {quoted(text)}; use a delimiter that is one token"
            )
        return Delimiter(text=text, ids=tuple(exact))

    def contains(self, delimiter: Delimiter, other: Delimiter) -> bool:
        """Whether the text of ``delimiter`` contains the text of ``other``."""
        symbols, part = self.vocabulary.symbols_of(delimiter.ids), self.vocabulary.symbols_of(other.ids)
        return any(symbols[at : at + len(part)] == part for at in range(len(symbols) - len(part) + 1))

    @cached_property
    def _missing_byte(self) -> int | None:
        return next((byte for byte in range(256) if self.vocabulary.tokenize_symbols([byte]) is None), None)

    def _encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def _text(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of ``ids``, with the texts of control tokens."""
        added = self.backend.get_added_tokens_decoder()
        parts = (self.vocabulary.tokens[token] or added[token].content.encode() for token in ids)
        return b"".join(parts)

    def _part_by_part(self, text: str) -> list[int]:
        """Encode ``text`` as the control tokens that the tokenizer finds, and the longest tokens between them."""
        encoded = self.backend.encode(text, add_special_tokens=False)
        places = [pair for pair in zip(encoded.ids, encoded.offsets, strict=True) if pair[0] in self.vocabulary.special]
        symbols, at = [], 0
        for token, (begin, end) in places:
            symbols += [*text[at:begin].encode(), CONTROL + token]
            at = end
        return self.vocabulary.tokenize_symbols([*symbols, *text[at:].encode()]) or []
