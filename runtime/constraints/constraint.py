"""One object per request decides everything that is allowed, and speaks only through mask rows.

Thinking, budget, grammar, stop tokens, minimum and maximum length, banned and allowed tokens: docs/design.md, section
5, gives the rules. ``fill`` writes the rows of a verification window, ``commit`` takes what verification emitted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tandemrt.engines.contract import mask_words
from tandemrt.engines.errors import BadRequest, InternalError
from tandemrt.runtime.constraints import bitmask
from tandemrt.runtime.constraints.arguments import check_lengths, check_markers, ids
from tandemrt.runtime.constraints.bad_words import ROOT, BadWords
from tandemrt.runtime.constraints.bitmask import FixedRow
from tandemrt.runtime.constraints.grammar import Grammar
from tandemrt.runtime.constraints.masks import NOTHING, MaskRows
from tandemrt.runtime.constraints.phases import Phases
from tandemrt.runtime.constraints.roles import Held, Piece, Scribe
from tandemrt.runtime.constraints.state import Phase, Refused, State
from tandemrt.runtime.constraints.thinking import ThinkingRule


class Filled(NamedTuple):
    """What is worth verifying of a window.

    Attributes:
        tokens: drafted tokens, up to the first one that its own row refuses or that ends the request.
        forced: which of them, by index, follow from the constraint and not from the draft.
    """

    tokens: list[int]
    forced: list[int]


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
        bad_words: texts that reasoning and answer must not hold, or None. A word that begins in the prompt is none.
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
        bad_words: BadWords | None = None,
    ) -> None:
        valid = vocab_size if valid_tokens is None else valid_tokens
        if not 0 < valid <= vocab_size:
            raise BadRequest(f"valid_tokens: must be in 1..vocab_size ({vocab_size}), got {valid_tokens}")
        check_lengths(min_tokens, max_tokens)
        stops = frozenset(ids("stop_ids", stop_ids, valid))
        choice = None if allowed is None else ids("allowed", allowed, valid)
        if choice == []:
            raise BadRequest("allowed: the list is empty, so nothing could be generated; leave it out or name tokens")
        base = bitmask.base_row(vocab_size, valid, ids("banned", banned, valid), choice)
        if thinking is not None:
            check_markers(thinking, stops, valid)
        self._words = mask_words(vocab_size)
        self._phases = Phases(base, stops, thinking, grammar, min_tokens, max_tokens)
        self._state = self._phases.start(prompt)
        self._bad_words, self._bad_node = bad_words, ROOT
        self._held: tuple[Held, ...] = ()  # what is out and has no certain role
        self._empty_after: tuple[int, ...] | None = None  # the draft prefix that the last fill saw nothing follow

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def finished(self) -> bool:
        return self._state.finish is not None

    @property
    def has_grammar(self) -> bool:
        return self._phases.grammar is not None

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
        scribe = Scribe(self._phases, self._held)
        scribe.flush(self._state)
        return scribe.pieces[0] if scribe.pieces else Piece(self._phases.plain_kind(self._state), ())

    @property
    def stuck(self) -> bool:
        """Whether no token at all may follow; ``commit([])`` then ends the request."""
        row = np.empty(self._words, np.int32)
        self._phases.write_row(self._state, row)
        self._forbid_words(self._state, self._bad_node, row)
        return not row.any()

    def may_force(self, tokens: int) -> bool:
        """Whether ``forced`` is worth asking once ``tokens`` more tokens are committed."""
        return self._phases.may_force(self._state, tokens)

    def forced(self, most: int) -> list[int]:
        """Up to ``most`` tokens that spell what must follow the committed ones; leaves no trace.

        What the grammar, a marker or a forced end goes on with, whatever the model says; none where it has a choice.
        Other tokens may spell the same, so they are drafted and verified like any others.
        """
        found: list[int] = []
        state = self._state
        try:
            while len(found) < most and (tokens := self._phases.forced(state)):
                for token in tokens[: most - len(found)]:
                    state, _ = self._phases.step(state, token)
                    found.append(token)
        except Exception:
            pass  # a banned token, say, or a text that is too complex; what is wrong ``fill`` says to its request alone
        finally:
            self._phases.undo()
        return found

    def fill(
        self, draft: Sequence[int], masks: MaskRows, first: int, *, most: int = 0, overrule: bool = False
    ) -> Filled:
        """Write the mask rows of a window and leave no trace.

        Args:
            draft: drafted tokens.
            masks: row ``first + i`` becomes the state after the committed tokens and the first i tokens of the window.
                Rows behind a refused or an ending token are never read, and left as they are.
            most: in a window of up to so many tokens, one that must follow takes the place of a drafted one that its
                row refuses, and of none; what was drafted behind another token falls away with it.
            overrule: it also takes the place of a drafted one that its row allows. Whether a token was drafted or
                forced then follows from those in front of it alone, as the rejection rule must have it.

        A token behind which the text would be too complex for its grammar is the last one, and its row allows nothing.

        Raises:
            BadRequest: the committed text is too complex for its grammar.
        """
        self._empty_after = None
        state, window = self._state, Filled([], [])
        drafted, follows, node = list(map(int, draft)), list[int](), self._bad_node
        self._phases.look_ahead(state, drafted)
        try:
            if run := self._fill_run(drafted, masks, first, overrule):
                window.tokens.extend(drafted[:run])
                state = self._phases.lengthened(state, run)
            while state.phase is not Phase.DONE:
                at = len(window.tokens)
                row = self._write_row(state, node, masks, first + at)
                token = drafted[at] if at < len(drafted) else None
                refused = token is None or not row.allows(token)
                if at < most and (refused or overrule):
                    follows = follows or self._phases.forced(state) or _single(row)
                    if follows and row.allows(follows[0]):
                        if token != follows[0]:
                            token, drafted = follows[0], drafted[:at]
                        window.forced.append(at)
                        refused = False
                if token is None or refused:
                    if row.empty:
                        self._empty_after = tuple(window.tokens)
                    break
                follows = follows[1:] if follows[:1] == [token] else []
                window.tokens.append(token)
                state, _ = self._phases.step(state, token)
                node = self._behind(node, token)
        except BadRequest:  # the text is too complex for its grammar
            if not window.tokens:
                raise
            # Behind a token that may never be taken: if it is, the run ends with it, and the next one begins here.
            masks.share(first + len(window.tokens), NOTHING)
        finally:
            self._phases.undo()
        return window

    def commit(self, tokens: Sequence[int]) -> Commit:
        """Advance by emitted tokens; those behind the one that ends the request are dropped.

        An empty run on a state that nothing may follow ends the request with ``constraint``.

        Raises:
            InternalError: a token that its own row forbids. Nothing has changed then.
        """
        emitted = list(map(int, tokens))
        if (run := self._commit_run(emitted)) is not None:
            return run
        self._phases.undo()
        state, scribe = self._state, Scribe(self._phases, self._held)
        kept: list[int] = []
        node = self._bad_node
        for token in emitted:
            if state.finish:
                break
            try:
                if self._completes_word(state, node, token):
                    raise Refused
                after, told = self._phases.step(state, token)
            except Refused:
                self._phases.undo()
                raise InternalError(
                    f"tokens: a mask row must allow every committed token; token {token} at index {len(kept)} is "
                    f"forbidden in phase {state.phase.value}. Verification must apply the rows that fill wrote"
                ) from None
            scribe.write(token, after, told)
            kept.append(token)
            state, node = after, self._behind(node, token)
        self._phases.keep()
        if state.finish is None and self._is_empty_after(kept):
            scribe.flush(state)
            state = state._replace(phase=Phase.DONE, finish="constraint")
        self._state, self._held, self._empty_after = state, tuple(scribe.held), None
        self._bad_node = node
        return Commit(kept, state.finish, state.stop_token, scribe.pieces)

    def fork(self) -> "Constraint":
        """An independent constraint in the same state."""
        copy = object.__new__(Constraint)
        copy.__dict__.update(self.__dict__)
        copy._phases = self._phases.fork()
        return copy

    def _fill_run(self, draft: Sequence[int], masks: MaskRows, first: int, overrule: bool) -> int:
        """Write the rows of the drafted tokens that do nothing but lengthen the text; how many.

        The grammar has been fed them, if it sees them, and none is one that forced tokens take the place of.
        """
        if not self._runs:
            return 0
        if plain := self._phases.plain_run(self._state, draft):
            shared = self._phases.shared_row(self._state)
            assert shared is not None
            if overrule and shared.only is not None:
                return 0
            masks.share(first, shared.words, plain)
            return plain
        return 0 if overrule else self._phases.answer_run(self._state, draft, lambda at: masks.own(first + at))

    def _commit_run(self, tokens: list[int]) -> Commit | None:
        """What ``tokens`` came to, if they do nothing but lengthen the text; else a grammar may have been fed some."""
        if not self._runs or not tokens or self._empty_after == tuple(tokens):
            return None
        state, phases = self._state, self._phases
        if (phases.plain_run(state, tokens) or phases.answer_run(state, tokens)) < len(tokens):
            return None
        phases.keep()
        self._state, self._empty_after = phases.lengthened(state, len(tokens)), None
        return Commit(tokens, pieces=[Piece(phases.plain_kind(state), tuple(tokens))])

    @property
    def _runs(self) -> bool:
        """Whether runs of tokens may be taken at once: nothing is held for a marker or looked through for words."""
        return not self._held and self._bad_words is None

    def _write_row(self, state: State, node: int, masks: MaskRows, index: int) -> FixedRow:
        """Let row ``index`` of ``masks`` be that of ``state``, and return it."""
        shared = self._phases.shared_row(state) if self._bad_words is None else None
        if shared is not None:
            masks.share(index, shared.words)
            return shared
        row = masks.own(index)
        self._phases.write_row(state, row)
        self._forbid_words(state, node, row)
        return FixedRow(row)

    def _forbid_words(self, state: State, node: int, row: np.ndarray) -> None:
        if self._bad_words is not None and not self._phases.committed(state):
            row &= self._bad_words.allowed(node)

    def _completes_word(self, state: State, node: int, token: int) -> bool:
        if self._bad_words is None or self._phases.committed(state):
            return False
        return not bitmask.allows(self._bad_words.allowed(node), token)

    def _behind(self, node: int, token: int) -> int:
        return node if self._bad_words is None else self._bad_words.step(node, token)

    def _is_empty_after(self, kept: list[int]) -> bool:
        if self._empty_after is not None:
            return self._empty_after == tuple(kept)
        return not kept and self.stuck


def _single(row: FixedRow) -> list[int]:
    """The token of a row that allows no other one."""
    return [] if row.only is None else [row.only]
