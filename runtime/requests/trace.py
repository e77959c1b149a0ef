"""Trace of one request: the drafted, allowed and emitted tokens of its rounds, recorded only on demand."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Literal, NamedTuple

from tandemrt.runtime.constraints.roles import RoleSpan
from tandemrt.runtime.constraints.transitions import Role

Source = Literal["accepted", "corrected", "bonus", "undrafted", "grammar", "delimiter", "budget"]
"""The origin of an output token.

``accepted``: drafted, and accepted by the target. ``corrected``: in place of a draft that the target or the mask
rejected. ``bonus``: after a draft window that was accepted in full. ``undrafted``: from a round without drafts.
``grammar``, ``delimiter`` and ``budget``: the mask allowed no other token, whether it was drafted or not, because of a
grammar (or a list of allowed tokens), a reasoning delimiter that had begun, or a thinking budget that had run out.
"""


@dataclass(frozen=True)
class TracedRound:
    """One round of one request.

    Attributes:
        filled: when the host wrote its mask rows, in seconds of ``time.perf_counter``.
        drafted: the drafted tokens.
        passed: how many drafted tokens passed the masks: all before the first one that its own row rejects.
        allowed: number of allowed tokens in each mask row, in order.
        emitted: the tokens that verification emitted. The text may end before the last one.
    """

    filled: float
    drafted: tuple[int, ...]
    passed: int
    allowed: tuple[int, ...]
    emitted: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        """Number of drafted tokens that verification accepted."""
        return max(0, len(self.emitted) - 1)

    def source(self, index: int) -> Source:
        """Return the origin of the emitted token at ``index``, forced tokens aside."""
        if index < self.accepted:
            return "accepted"
        if not self.drafted:
            return "undrafted"
        return "bonus" if index == len(self.drafted) else "corrected"


class TracedToken(NamedTuple):
    """A token of the output. ``role`` is None for a stop token; ``round`` is an index into ``RequestTrace.rounds``."""

    id: int
    role: Role | None
    source: Source
    drafted: bool
    allowed: int
    round: int


class RolePart(NamedTuple):
    """A token, or a part of one, that has a single role.

    Attributes:
        at: index of the token in the output.
        id: token whose text is the part.
    """

    at: int
    role: Role
    id: int


class RequestTrace:
    """The rounds of one request.

    The engine loop's thread writes. Other threads may read at any time; they see what was written before they began.
    """

    def __init__(self) -> None:
        self.rounds: list[TracedRound] = []
        self._begins: list[int] = []  # output position of each round's first token
        self.num_emitted = 0  # tokens of all rounds
        self._parts: list[RolePart] = []  # of the first tokens, whose roles are decided
        self._roles: list[Role] = []  # of the same tokens
        self._forced: Sequence[range] = ()  # output positions of forced reasoning ends
        self._filled: TracedRound | None = None  # not committed yet

    def record_fill(self, filled: float, drafted: Sequence[int], passed: int, allowed: Sequence[int]) -> None:
        """Record that the mask rows of a round were written. A round that is never committed leaves no trace."""
        self._filled = TracedRound(filled, tuple(drafted), passed, tuple(allowed))

    def record_commit(self, emitted: Sequence[int], forced: Sequence[range]) -> None:
        """Record the emitted tokens of the round filled last. ``forced``: see Constraint.forced_end_spans."""
        last, self._filled = self._filled, None
        assert last is not None
        self._forced = forced
        self.rounds.append(TracedRound(last.filled, last.drafted, last.passed, last.allowed, tuple(emitted)))
        self._begins.append(self.num_emitted)
        self.num_emitted += len(emitted)

    def add_roles(self, span: RoleSpan) -> None:
        """Record the role of the next tokens."""
        for index, token in enumerate(span.tokens):
            if index not in span.inner:  # a token with two roles counts as the first
                self._roles.append(span.role)
            self._parts.append(RolePart(len(self._roles) - 1, span.role, token))

    def parts(self, begin: int, end: int) -> Iterator["RolePart"]:
        """Yield the parts of output tokens [begin, end) whose role is decided."""
        first = bisect_left(self._parts, begin, key=lambda part: part.at)
        return takewhile(lambda part: part.at < end, islice(self._parts, first, None))

    def tokens(self, begin: int, end: int) -> Iterator[TracedToken]:
        """Yield output tokens [begin, end). ``end`` must not exceed the output's length."""
        first = max(0, bisect_right(self._begins, begin) - 1)
        for number in range(first, bisect_left(self._begins, end)):
            each = self.rounds[number]
            for index, token in enumerate(each.emitted):
                at = self._begins[number] + index
                if begin <= at < end:
                    role = self._roles[at] if at < len(self._roles) else None
                    yield TracedToken(
                        token,
                        role,
                        self._forced_by(at, role, each.allowed[index]) or each.source(index),
                        index < each.accepted,
                        each.allowed[index],
                        number,
                    )

    def _forced_by(self, at: int, role: Role | None, allowed: int) -> Source | None:
        if any(at in span for span in self._forced):
            return "budget"
        if allowed > 1:
            return None
        return "delimiter" if role == "delimiter" else "grammar"
