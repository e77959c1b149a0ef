"""From committed tokens to text: incremental, never half a character, never text that a stop string may still take."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders

from tandemrt.runtime.requests.stops import ROOT, StopMatcher


@dataclass(frozen=True)
class Delta:
    """Text that became certain since the last delta."""

    reasoning: str = ""
    text: str = ""


class Section:
    """One stretch of output (reasoning or answer) being detokenized.

    ``text`` is everything decoded so far; ``released`` counts the characters of it that can no longer change: what
    may turn out to be the beginning of a stop string is held back.

    Tokens are decoded in groups that end with a whole character, behind the group before them, because decoders join
    what they are given (spaces, bytes). tokenizers' DecodeStream does the same, but raises where a decoder takes back
    a character: byte fallback spells a run of byte tokens anew once it turns out not to be UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, stops: StopMatcher, *, skip_special: bool = True) -> None:
        self.text = ""
        self.released = 0
        self.stopped_by: str | None = None
        self._taken = 0  # characters that ``take`` has given
        self._tokenizer = tokenizer
        self._spells_bytes = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._skip_special = skip_special
        self._stops = stops
        self._node = ROOT  # of the end of the text
        self._context: list[int] = []  # the last group that gave text
        self._spelled = ""  # what it decodes to alone
        self._group: list[int] = []  # tokens behind it

    def push(self, token_ids: Sequence[int], *, include_stop: bool) -> int:
        """Add tokens, up to the one that completes a stop string, and say how many were added.

        On the first stop string found, cut the text there and set ``stopped_by``.
        """
        if self._push_whole(token_ids):
            return len(token_ids)
        for count, token_id in enumerate(token_ids, 1):
            self._group.append(token_id)
            self._extend(self._decode_group(half=False), include_stop=include_stop)
            if self.stopped_by is not None:
                return count
        return len(token_ids)

    def _push_whole(self, token_ids: Sequence[int]) -> bool:
        """Add tokens that are decoded at once, where that makes no difference: the decoder spells bytes, which need
        nothing in front of them, they end with a whole character, and no stop string is completed in them.
        """
        if not self._spells_bytes:
            return False
        text, node = self._decode([*self._group, *token_ids]), self._node
        if not text or text.endswith("\ufffd"):
            return False
        for character in text if self._stops.any else "":
            node = self._stops.step(node, character)
            if self._stops.found[node] is not None:
                return False
        self._node = node
        self.text += text
        self.released = len(self.text) - self._stops.depth[node]
        self._context, self._group, self._spelled = [], [], ""
        return True

    def finish(self) -> None:
        """Release what was held back, the bytes of an incomplete character (as U+FFFD) included."""
        if self.stopped_by is None and self._group:
            self.text += self._decode_group(half=True)
        self.released = len(self.text)
        self._node = ROOT

    def take(self) -> str:
        """What was released since the last call."""
        new = self.text[self._taken : self.released]
        self._taken = max(self._taken, self.released)
        return new

    def _decode_group(self, *, half: bool) -> str:
        """What the group adds to the text; nothing while it ends in half a character, unless ``half``."""
        text = self._decode(self._context + self._group)
        if text.endswith("\ufffd") and not half:
            return ""
        taken_back = not text.startswith(self._spelled)
        added = self._decode(self._group) if taken_back else text[len(self._spelled) :]
        if added:
            self._context, self._group = self._group, []
            self._spelled = self._decode(self._context)
        return added

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special))

    def _extend(self, piece: str, *, include_stop: bool) -> None:
        begin = len(self.text)
        self.text += piece
        for end, character in enumerate(piece, start=begin + 1):
            self._node = self._stops.step(self._node, character)
            self.stopped_by = self._stops.found[self._node]
            if self.stopped_by is not None:  # the one completed first, so that no tokenization matters
                self.text = self.text[: end if include_stop else end - len(self.stopped_by)]
                self.released = len(self.text)
                return
        self.released = len(self.text) - self._stops.depth[self._node]


class Transcript:
    """The text of one request, split into reasoning and answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        matcher = StopMatcher(stops)
        self._sections = {
            kind: Section(tokenizer, matcher, skip_special=skip_special) for kind in ("reasoning", "answer")
        }
        self._include_stop = include_stop
        self.tokens = 0  # tokens that were added, markers included
        self.reasoning_tokens = 0  # of those, reasoning

    @property
    def text(self) -> str:
        return self._sections["answer"].text

    @property
    def reasoning(self) -> str:
        return self._sections["reasoning"].text

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None."""
        return next((s.stopped_by for s in self._sections.values() if s.stopped_by is not None), None)

    def add(self, kind: str, token_ids: Sequence[int], inner: Collection[int] = ()) -> bool:
        """Add tokens of one kind (reasoning, marker, answer). True when a stop string ended the text at that token.

        Those at the indices ``inner`` spell the rest of a token that is counted already. Tokens behind the one that
        completed the stop string are not counted in ``tokens``. The other kind's text ends here: nothing of it is held
        back any longer, and a stop string does not straddle the gap.
        """
        for other in self._sections:
            if other != kind:
                self._sections[other].finish()
        section, count = self._sections.get(kind), len(token_ids)  # markers belong to neither text
        if section is not None:
            count = section.push(token_ids, include_stop=self._include_stop)
        counted = count - sum(index < count for index in inner)
        self.tokens += counted
        self.reasoning_tokens += counted if kind == "reasoning" else 0
        return section is not None and section.stopped_by is not None

    def finish(self) -> None:
        for section in self._sections.values():
            section.finish()

    def take(self) -> Delta:
        """What was released since the last call."""
        return Delta(self._sections["reasoning"].take(), self._sections["answer"].take())
