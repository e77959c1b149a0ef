"""Assign a role to every token of a text: reasoning, delimiter or answer, as soon as the role is certain."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tandemrt.runtime.constraints.rules import ConstraintRules
from tandemrt.runtime.constraints.transitions import ConstraintState, Role, RoleUpdate


@dataclass(frozen=True)
class RoleSpan:
    """Consecutive tokens with one certain role.

    A delimiter may begin or end inside an emitted token. Such a token is replaced by tokens for its parts. ``inner``
    holds the indices of all parts but the first, so ``emitted`` counts a split token once.
    """

    role: Role
    tokens: tuple[int, ...]
    inner: frozenset[int] = frozenset()

    @property
    def emitted(self) -> int:
        """The number of emitted tokens that begin in the span."""
        return len(self.tokens) - len(self.inner)


class UndecidedToken(NamedTuple):
    """An emitted token, or a part of one, whose role is not certain yet."""

    token: int
    inner: bool  # a part of a split token, but not its first part


class RoleTracker:
    """Assign roles to emitted tokens. ``undecided`` holds the tokens that have no certain role yet."""

    def __init__(self, rules: ConstraintRules, undecided: tuple[UndecidedToken, ...]) -> None:
        self._rules = rules
        self.undecided = list(undecided)
        self._decided: list[tuple[Role, list[UndecidedToken]]] = []

    @property
    def spans(self) -> list[RoleSpan]:
        """The tokens whose role this tracker decided, in order."""
        return [
            RoleSpan(
                role,
                tuple(each.token for each in tokens),
                frozenset(index for index, each in enumerate(tokens) if each.inner),
            )
            for role, tokens in self._decided
        ]

    def add(self, token: int, after: ConstraintState, updates: Iterable[RoleUpdate]) -> None:
        """Add ``token``, which led to the state ``after``, and apply the roles that it decides."""
        if after.stop_token is None:
            self.undecided.append(UndecidedToken(token, False))
        for role, undecided, splits in updates:
            if undecided == 0:
                self._decide(role, len(self.undecided))
            else:
                self._decide(role, self._count_before(undecided, splits))

    def flush(self, state: ConstraintState) -> None:
        """Give all undecided tokens the default role, because the text ends and no delimiter can be completed."""
        self._decide(state.default_role, len(self.undecided))

    def _count_before(self, undecided: int, splits: bool) -> int:
        """Return how many undecided tokens end before the last ``undecided`` symbols.

        ``splits``: a token that begins before these symbols and ends inside them is split, and its first parts count.
        """
        sizes = [len(self._rules.symbols(each.token)) for each in self.undecided]
        size, count = sum(sizes) - undecided, 0  # below 0 if the delimiter began in the prompt
        while size > 0 and size >= sizes[count]:
            size -= sizes[count]
            count += 1
        if size <= 0 or not splits:
            return count
        return count + self._split(count, size)

    def _decide(self, role: Role, count: int) -> None:
        if not count:
            return
        if not self._decided or self._decided[-1][0] != role:
            self._decided.append((role, []))
        self._decided[-1][1].extend(self.undecided[:count])
        del self.undecided[:count]

    def _split(self, index: int, size: int) -> int:
        """Split a token after its first ``size`` symbols. Return the number of tokens that make up these symbols."""
        symbols, inner = self._rules.symbols(self.undecided[index].token), self.undecided[index].inner
        first = self._rules.tokens_of(symbols[:size])
        parts = first + self._rules.tokens_of(symbols[size:])
        self.undecided[index : index + 1] = [UndecidedToken(part, inner or at > 0) for at, part in enumerate(parts)]
        return len(first)
