"""The rule of reasoning blocks: their delimiters, their token budget, and the forced end of a spent budget."""

import operator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.runtime.constraints import delimiters
from tandemrt.runtime.constraints.delimiters import Delimiter, DelimiterMatcher


@dataclass(frozen=True)
class ThinkingRule:
    """Reasoning delimiters, each as token ids, and a budget.

    A delimiter matches the text of its ids, also if the output has this text in other tokens. A control token matches
    only itself.

    Args:
        think_start: opens a block.
        think_ends: each closes a block.
        forced_end: the tokens that are emitted when the budget is spent, always completely. They must contain one of
            ``think_ends`` and may include text before and after it.
        implicit_ends: each closes a block and is part of the answer, such as a tool-call opener.
        budget: reasoning tokens allowed in one block. 0 closes it at once, None and -1 set no limit.
        vocabulary: the text of each id.

    Attributes:
        forced_delimiter: the place of the first end delimiter in ``forced_end``, counted in symbols.

    Raises:
        BadRequest: an empty or contradictory delimiter, a forced end without an end delimiter, any other budget.
    """

    think_start: Delimiter
    think_ends: tuple[Delimiter, ...]
    forced_end: Delimiter
    implicit_ends: tuple[Delimiter, ...] = ()
    budget: int | None = None
    vocabulary: Vocabulary = field(kw_only=True, repr=False)
    forced_delimiter: range = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        width = len(self.vocabulary.tokens)
        fields = {
            "think_start": _delimiter("think_start", self.think_start, width),
            "think_ends": _delimiters("think_ends", self.think_ends, width),
            "forced_end": _delimiter("forced_end", self.forced_end, width),
            "implicit_ends": _delimiters("implicit_ends", self.implicit_ends, width),
            "budget": _budget(self.budget),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if not self.think_ends:
            raise BadRequest("think_ends: must hold at least one end delimiter, got none; name one")
        ends = {self.vocabulary.symbols_of(end): end for end in self.think_ends}
        for implicit in self.implicit_ends:
            if both := ends.get(self.vocabulary.symbols_of(implicit)):
                raise BadRequest(
                    f"implicit_ends: {list(both)} is also one of think_ends; remove it from one of the two"
                )
        object.__setattr__(self, "forced_delimiter", _find_end(self))

    @cached_property
    def matcher(self) -> DelimiterMatcher:
        symbols = self.vocabulary.symbols_of
        ends, implicit_ends = (tuple(map(symbols, each)) for each in (self.think_ends, self.implicit_ends))
        return delimiters.matcher(self.vocabulary, symbols(self.think_start), ends, implicit_ends)


def _find_end(rule: ThinkingRule) -> range:
    symbols = rule.vocabulary.symbols_of
    forced_end = symbols(rule.forced_end)
    places = [
        range(begin, begin + len(end))
        for end in map(symbols, rule.think_ends)
        for begin in range(len(forced_end) - len(end) + 1)
        if forced_end[begin : begin + len(end)] == end
    ]
    if not places:
        raise BadRequest(
            f"forced_end: must contain one of think_ends {[list(end) for end in rule.think_ends]}, or the block would "
            f"never close; got {quoted(list(rule.forced_end))}. Append an end delimiter"
        )
    return min(places, key=lambda place: (place.stop, place.start))


def _delimiters(name: str, value: Any, width: int) -> tuple[Delimiter, ...]:
    try:
        items = list(value)
    except TypeError:
        items = [value]
    return tuple(_delimiter(f"{name}[{index}]", item, width) for index, item in enumerate(items))


def _delimiter(name: str, value: Any, width: int) -> Delimiter:
    try:
        delimiter = tuple(_integer(token) for token in value)
    except TypeError:
        raise BadRequest(f"{name}: must be a sequence of token ids, got {quoted(value)}") from None
    if not delimiter or min(delimiter) < 0:
        raise BadRequest(f"{name}: must be a non-empty sequence of token ids >= 0, got {quoted(value)}")
    if max(delimiter) >= width:
        raise BadRequest(f"{name}: token ids must be in 0..{width - 1}, got {quoted(list(delimiter))}")
    return delimiter


def _budget(value: Any) -> int | None:
    rule = "budget: must be an integer >= 0, or None or -1 for no limit"
    if value is None:
        return None
    try:
        budget = _integer(value)
    except TypeError:
        raise BadRequest(f"{rule}, got {quoted(value)}") from None
    if budget < -1:
        raise BadRequest(f"{rule}, got {quoted(value)}")
    return None if budget == -1 else budget


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("a bool is not accepted as an integer")
    return operator.index(value)
