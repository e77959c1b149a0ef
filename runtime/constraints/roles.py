"""Which role every token of a text has: reasoning, marker or answer, once that is certain."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tandemrt.runtime.constraints.phases import Phases
from tandemrt.runtime.constraints.state import Kind, State, Told


@dataclass(frozen=True)
class Piece:
    """Tokens whose role has become certain.

    A token of which parts have different roles comes as tokens that spell the parts; ``inner`` are the indices of those
    that are not the first of one, so that all others count the tokens that were emitted.
    """

    kind: Kind
    tokens: tuple[int, ...]
    inner: frozenset[int] = frozenset()

    @property
    def emitted(self) -> int:
        """How many emitted tokens begin here."""
        return len(self.tokens) - len(self.inner)


class Held(NamedTuple):
    """A token that is out and whose role is not certain."""

    token: int  # of the text, or one that spells part of such a one
    inner: bool  # spells a part that is not the first


class Scribe:
    """Gives every token its role as soon as the role is certain."""

    def __init__(self, phases: Phases, held: tuple[Held, ...]) -> None:
        self._phases = phases
        self.held = list(held)
        self._told: list[tuple[Kind, list[Held]]] = []

    @property
    def pieces(self) -> list[Piece]:
        return [
            Piece(kind, tuple(each.token for each in told), frozenset(at for at, each in enumerate(told) if each.inner))
            for kind, told in self._told
        ]

    def write(self, token: int, after: State, told: Iterable[Told]) -> None:
        if after.stop_token is None:
            self.held.append(Held(token, False))
        for kind, left, cuts in told:
            if left == 0:
                self._release(kind, len(self.held))
            else:
                self._release(kind, self._until(left, cuts))

    def flush(self, state: State) -> None:
        self._release(self._phases.plain_kind(state), len(self.held))

    def _until(self, left: int, cuts: bool) -> int:
        """How many of those held lie before the last ``left`` symbols; one that lies in part before them is cut."""
        sizes = [len(self._phases.symbols(held.token)) for held in self.held]
        size, count = sum(sizes) - left, 0  # below 0 where a marker began in the prompt
        while size > 0 and size >= sizes[count]:
            size -= sizes[count]
            count += 1
        if size <= 0 or not cuts:
            return count
        return count + self._cut(count, size)

    def _release(self, kind: Kind, count: int) -> None:
        if not count:
            return
        if not self._told or self._told[-1][0] != kind:
            self._told.append((kind, []))
        self._told[-1][1].extend(self.held[:count])
        del self.held[:count]

    def _cut(self, index: int, size: int) -> int:
        """Replace a token by those that spell its first ``size`` symbols, as many as are returned, and the others."""
        symbols, inner = self._phases.symbols(self.held[index].token), self.held[index].inner
        first = self._phases.spell(symbols[:size])
        parts = first + self._phases.spell(symbols[size:])
        self.held[index : index + 1] = [Held(part, inner or at > 0) for at, part in enumerate(parts)]
        return len(first)
