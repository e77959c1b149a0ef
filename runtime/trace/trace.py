"""What the rounds of one request drafted, allowed and emitted; kept only where somebody asked for it."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Literal, NamedTuple

from tandemrt.runtime.constraints.roles import Piece
from tandemrt.runtime.constraints.state import Kind

Source = Literal["kept", "corrected", "bonus", "alone", "grammar", "marker", "budget"]
"""Where a token came from.

``kept``: drafted, and the target agreed. ``corrected``: instead of a drafted one that the target or the mask refused.
``bonus``: behind a window that was accepted whole. ``alone``: in a round without drafts. ``grammar``, ``marker`` and
``budget``: forced, drafted or not, because the mask left no other token: by a grammar (or a list of allowed tokens),
by a marker that had begun, or by the end of a thinking budget.
"""


@dataclass(frozen=True)
class TracedRound:
    """One round of one request.

    Attributes:
        filled: when its masks were written, in seconds of ``time.perf_counter``.
        drafted: the drafted tokens.
        passed: how many of them the masks let pass: up to the first one that its own row refused.
        allowed: how many tokens each mask row let pass, that of the first token first.
        emitted: the tokens that verification decided; the text may end before the last one.
    """

    filled: float
    drafted: tuple[int, ...]
    passed: int
    allowed: tuple[int, ...]
    emitted: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        """Drafted tokens that verification took."""
        return max(0, len(self.emitted) - 1)

    def source(self, index: int) -> Source:
        """Where the emitted token at ``index`` came from, if nothing forced it."""
        if index < self.accepted:
            return "kept"
        if not self.drafted:
            return "alone"
        return "bonus" if index == len(self.drafted) else "corrected"


class TracedToken(NamedTuple):
    """A token of the output: ``kind`` is None for a stop token, ``round`` as in ``Trace.rounds``."""

    id: int
    kind: Kind | None
    source: Source
    drafted: bool
    allowed: int
    round: int


class Part(NamedTuple):
    """Of the output's token ``at``, all or a part of one role, and the token that spells it."""

    at: int
    kind: Kind
    id: int


class Trace:
    """Rounds of one request. Written by the loop's thread; others may read what stood there when they began."""

    def __init__(self) -> None:
        self.rounds: list[TracedRound] = []
        self._parts: list[Part] = []  # of the first tokens: those whose role is certain
        self._kinds: list[Kind] = []  # of the same tokens
        self._forced: Sequence[range] = ()  # where in the output thinking budgets wrote their ends
        self._filled: TracedRound | None = None  # not committed yet

    def fill(self, filled: float, drafted: Sequence[int], passed: int, allowed: Sequence[int]) -> None:
        """A round's masks were written. One that is never committed leaves nothing behind."""
        self._filled = TracedRound(filled, tuple(drafted), passed, tuple(allowed))

    def commit(self, emitted: Sequence[int], forced: Sequence[range]) -> None:
        """The round that was filled last was verified. ``forced``: see Constraint.forced_spans."""
        last, self._filled = self._filled, None
        assert last is not None
        self._forced = forced
        self.rounds.append(TracedRound(last.filled, last.drafted, last.passed, last.allowed, tuple(emitted)))

    def know(self, piece: Piece) -> None:
        """The role of the next tokens is certain."""
        for index, token in enumerate(piece.tokens):
            if index not in piece.inner:  # a token of two kinds has that of its beginning
                self._kinds.append(piece.kind)
            self._parts.append(Part(len(self._kinds) - 1, piece.kind, token))

    def parts(self, begin: int, end: int) -> Iterator["Part"]:
        """Yield the parts of the output's tokens at [begin, end) whose role is certain."""
        first = bisect_left(self._parts, begin, key=lambda part: part.at)
        return takewhile(lambda part: part.at < end, islice(self._parts, first, None))

    def tokens(self, begin: int, end: int) -> Iterator[TracedToken]:
        """Yield the tokens of the output at [begin, end); behind its end nothing was ever kept."""
        at = 0
        for number, each in enumerate(self.rounds):
            for index, token in enumerate(each.emitted):
                if begin <= at < end:
                    kind = self._kinds[at] if at < len(self._kinds) else None
                    yield TracedToken(
                        token,
                        kind,
                        self._forced_by(at, kind, each.allowed[index]) or each.source(index),
                        index < each.accepted,
                        each.allowed[index],
                        number,
                    )
                at += 1

    def _forced_by(self, at: int, kind: Kind | None, allowed: int) -> Source | None:
        if any(at in span for span in self._forced):
            return "budget"
        if allowed > 1:
            return None
        return "marker" if kind == "marker" else "grammar"
