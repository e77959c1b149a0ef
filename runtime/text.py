"""From committed tokens to text: incremental, never half a character, never text that a stop string may still take."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


@dataclass(frozen=True)
class Delta:
    """Text that became certain since the last delta."""

    reasoning: str = ""
    text: str = ""


class Section:
    """One stretch of output (reasoning or answer) being detokenised.

    ``text`` is everything decoded so far; ``released`` counts the characters of it that can no longer change: what
    may turn out to be the beginning of a stop string is held back.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.text = ""
        self.released = 0
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []

    def push(self, token_id: int, *, include_stop: bool) -> None:
        """Add one token. On the first stop string found, cut the text there and set ``stopped_by``."""
        self._token_ids.append(token_id)
        self._extend(self._stream.step(self._tokenizer, token_id) or "", include_stop=include_stop)

    def finish(self) -> None:
        """Release what was held back, the bytes of an incomplete character (as U+FFFD) included."""
        if self.stopped_by is None:
            whole = str(self._tokenizer.decode(self._token_ids, skip_special_tokens=True))
            self.text += whole[len(self.text) :]
        self.released = len(self.text)

    def _extend(self, piece: str, *, include_stop: bool) -> None:
        if not piece:
            return
        longest = max(map(len, self._stops), default=1)
        start = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self.text = self.text[: at + len(self.stopped_by) if include_stop else at]
            self.released = len(self.text)
        else:
            self.released = max(self.released, len(self.text) - self._held())

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops):
                return length
        return 0


class Transcript:
    """The text of one request, split into reasoning and answer."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._sections = {kind: Section(tokenizer, stops) for kind in ("reasoning", "answer")}
        self._include_stop = include_stop
        self._taken = dict.fromkeys(self._sections, 0)
        self.tokens = 0  # tokens that were added, markers included

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

    def add(self, kind: str, token_ids: Sequence[int]) -> bool:
        """Add tokens of one kind (reasoning, marker, answer). True when a stop string ended the text at that token.

        Tokens behind the one that completed the stop string are not counted in ``tokens``.
        """
        for token_id in token_ids:
            self.tokens += 1
            section = self._sections.get(kind)  # markers belong to neither text
            if section is not None:
                section.push(token_id, include_stop=self._include_stop)
                if section.stopped_by is not None:
                    return True
        return False

    def finish(self) -> None:
        for section in self._sections.values():
            section.finish()

    def take(self) -> Delta:
        """Return what was released since the last call."""
        parts = {}
        for kind, section in self._sections.items():
            parts[kind] = section.text[self._taken[kind] : section.released]
            self._taken[kind] = max(self._taken[kind], section.released)
        return Delta(parts["reasoning"], parts["answer"])
