"""How markers of reasoning are spelled: the token ids that a model would most likely write for a text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandemrt.engines.errors import BadBundle, BadCheckpoint, BadRecipe, quoted
from tandemrt.engines.manifest import Marker
from tandemrt.engines.tokenizer import open_tokenizer
from tandemrt.engines.vocabulary import CONTROL, Vocabulary


@dataclass(frozen=True)
class Speller:
    """Spells texts with ``backend``, a tokenizer of ``tokenizers``; what its ids spell is ``vocabulary``.

    A marker is found in a text whatever tokens spell it there, so its ids only have to spell it, each control token in
    it by itself alone.
    """

    backend: Any
    vocabulary: Vocabulary

    @classmethod
    def open(cls, folder: Path, size: int, markers: Sequence[str]) -> "Speller":
        """Open the tokenizer in ``folder``, with ``size`` ids, for these markers. Raises BadCheckpoint.

        A token with the text of a marker is a control token.
        """
        try:
            tokenizer, vocabulary = open_tokenizer(folder, size, markers=markers)
        except BadBundle as error:
            raise BadCheckpoint(f"checkpoint {folder}: {error}") from error
        return cls(tokenizer.backend, vocabulary)

    def spell(self, key: str, text: str) -> Marker:
        """Return the ids of a marker's text, without the tokens that an encoder adds around a text.

        Raises BadRecipe when the tokenizer changes the text, or cannot spell parts of a token.
        """
        ids = self._encode(text)
        unknown = getattr(self.backend.model, "unk_token", None)
        decoded = self.backend.decode(ids, skip_special_tokens=False)
        if not ids or (unknown is not None and self.backend.token_to_id(unknown) in ids) or decoded != text:
            got = repr(decoded) if ids else "nothing"
            raise BadRecipe(
                f"{key}: the tokenizer cannot spell {quoted(text)}, it gives {got}; use a text it can spell"
            )
        # Some tokenizers put a space in front of a text's first word: as they spell it behind a line break, then.
        line = self._encode("\n")
        behind = self._encode("\n" + text)
        ways = [ids, behind[len(line) :] if behind[: len(line)] == line else [], self._part_by_part(text)]
        found = next((way for way in ways if self._text(way) == text.encode()), None)
        if found is None:
            raise BadRecipe(f"{key}: the tokenizer has no tokens that spell {quoted(text)}; use a text it can spell")
        mute = next((byte for byte in range(256) if self.vocabulary.spell([byte]) is None), None)
        if mute is not None and any(self.vocabulary.tokens[token] for token in found):
            raise BadRecipe(
                f"{key}: a marker that is text needs a tokenizer with a token for every byte, there is none for "
                f"{mute}; got {quoted(text)}; use a marker that is a token of its own"
            )
        return Marker(text=text, ids=tuple(found))

    def holds(self, marker: Marker, other: Marker) -> bool:
        """Whether the text of ``marker`` holds that of ``other``."""
        whole, part = self.vocabulary.spelled(marker.ids), self.vocabulary.spelled(other.ids)
        return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))

    def _encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def _text(self, ids: Sequence[int]) -> bytes:
        """What ids spell, with the texts of control tokens."""
        added = self.backend.get_added_tokens_decoder()
        parts = (self.vocabulary.tokens[token] or added[token].content.encode() for token in ids)
        return b"".join(parts)

    def _part_by_part(self, text: str) -> list[int]:
        """Control tokens as the tokenizer finds them, and the longest tokens for what is between them."""
        encoded = self.backend.encode(text, add_special_tokens=False)
        places = [pair for pair in zip(encoded.ids, encoded.offsets, strict=True) if pair[0] in self.vocabulary.special]
        symbols, at = [], 0
        for token, (begin, end) in places:
            symbols += [*text[at:begin].encode(), CONTROL + token]
            at = end
        return self.vocabulary.spell([*symbols, *text[at:].encode()]) or []
