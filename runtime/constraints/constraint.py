"""One object per request decides everything that is allowed, and speaks only through mask rows.

Thinking, budget, grammar, stop tokens, minimum and maximum length, banned and allowed tokens: docs/design.md, section
5, gives the rules. ``fill`` writes the rows of a verification window, ``commit`` takes what verification emitted.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tandemrt.engines.contract import mask_words
from tandemrt.engines.errors import BadRequest, InternalError, quoted
from tandemrt.runtime.constraints import bitmask
from tandemrt.runtime.constraints.masks import MaskRows
from tandemrt.runtime.constraints.phases import Grammar, Kind, Phase, Phases, Refused, State, Told
from tandemrt.runtime.constraints.thinking import ThinkingRule


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


@dataclass(frozen=True)
class Commit:
    """What a run of emitted tokens came to.

    Attributes:
        kept: the tokens that become text, up to and including the first one that ends the request.
        finish: ``stop``, ``length``, ``constraint`` (nothing at all may follow), or None.
        stop_token: the stop token that ended the request; it is in ``kept`` and in no piece.
        pieces: tokens whose role became certain, in order. Tokens that may yet be part of a marker come with a later
            commit; when the request finishes, all have come.
    """

    kept: list[int]
    finish: str | None = None
    stop_token: int | None = None
    pieces: list[Piece] = field(default_factory=list)


class Constraint:
    """The constraint of one request.

    Args:
        vocab_size: width of the model's logits.
        stop_ids: tokens that end the answer.
        prompt: token ids; its last marker decides the phase at the start.
        thinking: the rule of reasoning blocks, or None.
        grammar: a fresh grammar for the answer; this object owns it from now on.
        min_tokens: stop tokens are forbidden before so many tokens are out.
        max_tokens: the request ends with ``length`` after so many tokens.
        banned, allowed: token ids. Neither touches a forced end, which is emitted whole.
        valid_tokens: ids from here on are padding of the logits and always forbidden; None: there is no padding.

    With a thinking rule, a grammar and no marker in the prompt (OPEN), the answer may begin with the start marker or
    with what the grammar allows. Once a token fits only the marker, the rest of the marker is forced.

    Raises:
        BadRequest: an id or a length out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        stop_ids: Iterable[int],
        *,
        prompt: Sequence[int] = (),
        thinking: ThinkingRule | None = None,
        grammar: Grammar | None = None,
        min_tokens: int = 0,
        max_tokens: int | None = None,
        banned: Iterable[int] = (),
        allowed: Iterable[int] | None = None,
        valid_tokens: int | None = None,
    ) -> None:
        valid = vocab_size if valid_tokens is None else valid_tokens
        if not 0 < valid <= vocab_size:
            raise BadRequest(f"valid_tokens: must be in 1..vocab_size ({vocab_size}), got {valid_tokens}")
        _check_lengths(min_tokens, max_tokens)
        stops = frozenset(_ids("stop_ids", stop_ids, valid))
        choice = None if allowed is None else _ids("allowed", allowed, valid)
        if choice == []:
            raise BadRequest("allowed: the list is empty, so nothing could be generated; leave it out or name tokens")
        base = bitmask.base_row(vocab_size, valid, _ids("banned", banned, valid), choice)
        if thinking is not None:
            _check_markers(thinking, stops, valid)
        self._words = mask_words(vocab_size)
        self._phases = Phases(base, stops, thinking, grammar, min_tokens, max_tokens)
        self._state = self._phases.start(prompt)
        self._held: tuple[_Held, ...] = ()  # what is out and has no certain role
        self._empty_after: tuple[int, ...] | None = None  # the draft prefix that the last fill saw nothing follow

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def finished(self) -> bool:
        return self._state.finish is not None

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens of the current or last block, those in the prompt included."""
        return self._state.spent

    @property
    def forced_ends(self) -> int:
        """How often a budget forced the end of a block."""
        return len(self._state.forced_at)

    def forced_ends_within(self, length: int) -> int:
        """How many forced ends began within the first ``length`` tokens: a stop string may have cut the others off."""
        return sum(at <= length for at in self._state.forced_at)

    @property
    def forced_spans(self) -> list[range]:
        """Where in the output budgets wrote their forced ends, as far as they are out."""
        return self._phases.forced_spans(self._state)

    @property
    def undecided(self) -> Piece:
        """What is out and might yet become part of a marker, as what it is if it does not."""
        scribe = _Scribe(self._phases, self._held)
        scribe.flush(self._state)
        return scribe.pieces[0] if scribe.pieces else Piece(self._phases.plain_kind(self._state), ())

    @property
    def stuck(self) -> bool:
        """Whether no token at all may follow; ``commit([])`` then ends the request."""
        row = np.empty(self._words, np.int32)
        self._phases.write_row(self._state, row)
        return not row.any()

    def fill(self, draft: Sequence[int], masks: MaskRows, first: int) -> int:
        """Write the mask rows of a window and leave no trace.

        Args:
            draft: K drafted tokens.
            masks: row ``first + i`` becomes the state after the committed tokens and ``draft[:i]``. Of the K+1 rows
                those behind a refused or an ending token are never read, and left as they are.

        Returns:
            How many drafted tokens are worth verifying: those before the first one that its own row refuses, and
            none behind a token that ends the request.
        """
        self._empty_after = None
        state, usable = self._state, 0
        try:
            while state.phase is not Phase.DONE:
                row = self._phases.shared_row(state)
                if row is not None:
                    masks.share(first + usable, row)
                else:
                    row = masks.own(first + usable)
                    self._phases.write_row(state, row)
                if usable == len(draft) or not bitmask.allows(row, int(draft[usable])):
                    if not row.any():
                        self._empty_after = tuple(map(int, draft[:usable]))
                    break
                state, _ = self._phases.step(state, int(draft[usable]))
                usable += 1
        finally:
            self._phases.undo()
        return usable

    def commit(self, tokens: Sequence[int]) -> Commit:
        """Advance by emitted tokens; those behind the one that ends the request are dropped.

        An empty run on a state that nothing may follow ends the request with ``constraint``.

        Raises:
            InternalError: a token that its own row forbids. Nothing has changed then.
        """
        state, scribe = self._state, _Scribe(self._phases, self._held)
        kept: list[int] = []
        for token in map(int, tokens):
            if state.finish:
                break
            try:
                after, told = self._phases.step(state, token)
            except Refused:
                self._phases.undo()
                raise InternalError(
                    f"tokens: a mask row must allow every committed token; token {token} at index {len(kept)} is "
                    f"forbidden in phase {state.phase.value}. Verification must apply the rows that fill wrote"
                ) from None
            scribe.write(token, after, told)
            kept.append(token)
            state = after
        self._phases.keep()
        if state.finish is None and self._is_empty_after(kept):
            scribe.flush(state)
            state = state._replace(phase=Phase.DONE, finish="constraint")
        self._state, self._held, self._empty_after = state, tuple(scribe.held), None
        return Commit(kept, state.finish, state.stop_token, scribe.pieces)

    def fork(self) -> "Constraint":
        """An independent constraint in the same state."""
        copy = object.__new__(Constraint)
        copy.__dict__.update(self.__dict__)
        copy._phases = self._phases.fork()
        return copy

    def _is_empty_after(self, kept: list[int]) -> bool:
        if self._empty_after is not None:
            return self._empty_after == tuple(kept)
        return not kept and self.stuck


class _Held(NamedTuple):
    token: int  # of the text, or one that spells part of such a one
    inner: bool  # spells a part that is not the first


class _Scribe:
    """Gives every token its role as soon as the role is certain."""

    def __init__(self, phases: Phases, held: tuple[_Held, ...]) -> None:
        self._phases = phases
        self.held = list(held)
        self.pieces: list[Piece] = []

    def write(self, token: int, after: State, told: Iterable[Told]) -> None:
        if after.stop_token is None:
            self.held.append(_Held(token, False))
        for kind, left, cuts in told:
            size = sum(len(self._phases.symbols(held.token)) for held in self.held) if left else 0
            self._release(kind, size - left if left else None, cuts)

    def flush(self, state: State) -> None:
        self._release(self._phases.plain_kind(state), None, cuts=False)

    def _release(self, kind: Kind, size: int | None, cuts: bool) -> None:
        """What spells the first ``size`` symbols is of this ``kind``; None: all."""
        count = 0
        while count < len(self.held) and (size is None or size > 0):  # a marker may have begun in the prompt
            symbols = self._phases.symbols(self.held[count].token)
            if size is not None and size < len(symbols):
                if not cuts:
                    break
                self._cut(count, symbols, size)
                continue
            count += 1
            size = None if size is None else size - len(symbols)
        if not count:
            return
        told, self.held = self.held[:count], self.held[count:]
        if self.pieces and self.pieces[-1].kind == kind:
            before = self.pieces.pop()
            told = [_Held(token, at in before.inner) for at, token in enumerate(before.tokens)] + told
        inner = frozenset(at for at, held in enumerate(told) if held.inner)
        self.pieces.append(Piece(kind, tuple(held.token for held in told), inner))

    def _cut(self, index: int, symbols: Sequence[int], size: int) -> None:
        """Replace a token by those that spell its first ``size`` symbols, and those that spell the others."""
        parts = self._phases.spell(symbols[:size]) + self._phases.spell(symbols[size:])
        inner = self.held[index].inner
        self.held[index : index + 1] = [_Held(part, inner or at > 0) for at, part in enumerate(parts)]


def _ids(name: str, tokens: Iterable[int], valid: int) -> list[int]:
    ids = []
    for token in tokens:
        try:
            number = operator.index(token)
        except TypeError:
            raise BadRequest(f"{name}: must be token ids, got {quoted(token)}") from None
        if not 0 <= number < valid:
            raise BadRequest(f"{name}: token ids must be in 0..{valid - 1}, got {quoted(number)}")
        ids.append(number)
    return ids


def _check_lengths(min_tokens: Any, max_tokens: Any) -> None:
    for name, value, least in (("min_tokens", min_tokens, 0), ("max_tokens", max_tokens, 1)):
        if value is None and name == "max_tokens":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadRequest(f"{name}: must be an integer >= {least}, got {quoted(value)}")
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens: must not be above max_tokens ({quoted(max_tokens)}), got {quoted(min_tokens)}")


def _check_markers(rule: ThinkingRule, stops: frozenset[int], valid: int) -> None:
    named = [("start", rule.start), ("forced_end", rule.forced_end)]
    named += [("ends", end) for end in rule.ends] + [("implicit_ends", end) for end in rule.implicit_ends]
    for name, marker in named:
        if max(marker) >= valid:
            raise BadRequest(f"thinking.{name}: token ids must be in 0..{valid - 1}, got {quoted(list(marker))}")
        if stops.intersection(marker):
            raise BadRequest(f"thinking.{name}: must not contain a stop token, got {quoted(list(marker))}")
