"""The checked settings of one request's constraint, and the mask rows that depend on nothing else."""

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.runtime.constraints.bad_words import BadWords
from tandemrt.runtime.constraints.delimiters import NO_DELIMITERS, Delimiter, DelimiterMatcher
from tandemrt.runtime.constraints.ordinary import OrdinaryTokens
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.grammars import bitmask
from tandemrt.runtime.grammars.bitmask import FixedRow
from tandemrt.runtime.grammars.grammar import Grammar

_MOST_STOPS = 64  # stop tokens of a request that shares its rows: the cache keeps them


class BaseRows(NamedTuple):
    """The rows of a request that depend on no text.

    Attributes:
        all: the tokens that are neither padding nor banned.
        without_stops: these, without the stop tokens of the request.
        without_grammar_stops: these, without those of its grammar either.
    """

    all: FixedRow
    without_stops: FixedRow
    without_grammar_stops: FixedRow


class ConstraintRules:
    """Immutable settings that the forks of a constraint share.

    The caches ``thinking_rows`` and ``ordinary`` grow with use; they change no result.

    Args: see Constraint. Only the stop tokens of ``grammar`` are read.

    Raises:
        BadRequest: an id or a length out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        stop_ids: Iterable[int],
        *,
        thinking: ThinkingRule | None,
        grammar: Grammar | None,
        min_tokens: int,
        max_tokens: int | None,
        banned: Iterable[int],
        allowed: Iterable[int] | None,
        valid_tokens: int | None,
        bad_words: BadWords | None,
    ) -> None:
        valid = vocab_size if valid_tokens is None else valid_tokens
        if not 0 < valid <= vocab_size:
            raise BadRequest(f"valid_tokens: must be in 1..vocab_size ({vocab_size}), got {valid_tokens}")
        _check_lengths(min_tokens, max_tokens)
        stops = frozenset(_ids("stop_ids", stop_ids, valid))
        choice = None if allowed is None else _ids("allowed", allowed, valid)
        if choice == []:
            raise BadRequest("allowed: the list is empty, so nothing could be generated; leave it out or name tokens")
        forbidden = _ids("banned", banned, valid)
        if thinking is not None:
            _check_delimiters(thinking, stops, valid)
        self.thinking = thinking
        self.bad_words = bad_words
        self.matcher = thinking.matcher if thinking else None
        self.nodes, self.first_symbols = (
            (self.matcher.nodes, self.matcher.first) if self.matcher else (NO_DELIMITERS, frozenset[int]())
        )
        self.think_start: Delimiter = thinking.vocabulary.symbols_of(thinking.think_start) if thinking else ()
        self.forced_end: Delimiter = thinking.forced_end if thinking else ()
        self.forced_delimiter = thinking.forced_delimiter if thinking else range(0)
        self.budget = thinking.budget if thinking else None
        self.stop_ids, self.min_tokens, self.max_tokens = stops, min_tokens, max_tokens
        # A grammar may end with stop tokens of the bundle that the request ignores; these do not end the request.
        self.grammar_stops = frozenset(grammar.stop_ids) | stops if grammar else stops
        of_all = vocab_size, valid, stops, self.grammar_stops
        shares = not forbidden and choice is None and len(self.grammar_stops) <= _MOST_STOPS
        rows = _shared_rows(*of_all) if shares else _base_rows(*of_all, forbidden, choice)
        self.base, self.base_without_stops, self._answer_without_stops = rows
        self.may_think = thinking is not None and all(map(self.base.allows, thinking.think_start))
        self.thinking_rows: dict[tuple[int, int], FixedRow] = {}  # by matcher node and `in_prompt`, with a grammar
        ordinary = _shared_ordinary(thinking) if shares else _ordinary
        self.ordinary = ordinary(self.base_without_stops, self.matcher)

    def symbols(self, token: int) -> Sequence[int]:
        """Return the symbols of ``token``; without a thinking rule a token is one symbol."""
        return self.thinking.vocabulary.symbols(token) if self.thinking else (token,)

    def tokens_of(self, symbols: Sequence[int]) -> list[int]:
        """Return tokens with exactly these ``symbols``, which are a part of one token."""
        assert self.thinking is not None
        tokens = self.thinking.vocabulary.tokenize_symbols(symbols)
        assert tokens is not None
        return tokens

    def answer_base(self, length: int) -> FixedRow:
        """Return the row of an answer after ``length`` emitted tokens; a grammar masks out more."""
        return self.base if length >= self.min_tokens else self._answer_without_stops


def _base_rows(
    vocab_size: int,
    valid: int,
    stops: frozenset[int],
    grammar_stops: frozenset[int],
    banned: Sequence[int] = (),
    allowed: Sequence[int] | None = None,
) -> BaseRows:
    base = bitmask.base_row(vocab_size, valid, banned, allowed)
    rows = base, bitmask.without(base, stops), bitmask.without(base, grammar_stops)
    for row in rows:
        row.setflags(write=False)  # requests share it
    return BaseRows(*map(FixedRow, rows))


def _ordinary(allowed: FixedRow, matcher: DelimiterMatcher | None) -> OrdinaryTokens:
    def decide(token: int) -> bool:
        return allowed.allows(token) and (matcher is None or matcher.cannot_begin_delimiter(token))

    return OrdinaryTokens(32 * len(allowed.words), decide)


def _shared_ordinary(thinking: ThinkingRule | None) -> Callable[[FixedRow, DelimiterMatcher | None], OrdinaryTokens]:
    """Return ``_ordinary`` with a cache. That of a matcher ends with its vocabulary, which the matcher keeps."""
    if thinking is None:
        return _ordinary_without_delimiters
    derived = thinking.vocabulary.derived
    if _ordinary not in derived:
        derived[_ordinary] = lru_cache(maxsize=64)(_ordinary)
    cached: Callable[[FixedRow, DelimiterMatcher | None], OrdinaryTokens] = derived[_ordinary]
    return cached


# Requests with the same stop tokens have the same objects, so the rows of a slot need no copy to the device when the
# next request joins it (MaskRows), and one look-up finds the ordinary tokens of all slots (SteadyRows).
_shared_rows = lru_cache(maxsize=64)(_base_rows)
_ordinary_without_delimiters = lru_cache(maxsize=64)(_ordinary)


def _ids(name: str, tokens: Iterable[int], valid: int) -> list[int]:
    """Return ``tokens``, the argument ``name``, as integers below ``valid``. Raises BadRequest for any other value."""
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
    """Raise BadRequest unless both are integers and ``min_tokens <= max_tokens``; None: no maximum."""
    for name, value, least in (("min_tokens", min_tokens, 0), ("max_tokens", max_tokens, 1)):
        if value is None and name == "max_tokens":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadRequest(f"{name}: must be an integer >= {least}, got {quoted(value)}")
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens: must not be above max_tokens ({quoted(max_tokens)}), got {quoted(min_tokens)}")


def _check_delimiters(rule: ThinkingRule, stops: frozenset[int], valid: int) -> None:
    """Raise BadRequest for a delimiter with an id from ``valid`` on, or with a stop token."""
    named = [("think_start", rule.think_start), ("forced_end", rule.forced_end)]
    named += [("think_ends", end) for end in rule.think_ends] + [("implicit_ends", end) for end in rule.implicit_ends]
    for name, delimiter in named:
        if max(delimiter) >= valid:
            raise BadRequest(f"thinking.{name}: token ids must be in 0..{valid - 1}, got {quoted(list(delimiter))}")
        if stops.intersection(delimiter):
            raise BadRequest(f"thinking.{name}: must not contain a stop token, got {quoted(list(delimiter))}")
