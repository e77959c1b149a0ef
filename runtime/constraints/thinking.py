"""The rule of a reasoning block: what opens it, what closes it, how long it may be, how it is closed by force."""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.engines.vocabulary import Vocabulary
from tandemrt.runtime.constraints import markers
from tandemrt.runtime.constraints.markers import ROOT, Marker, MarkerMatcher


@dataclass(frozen=True)
class ThinkingRule:
    """Markers, each as token ids that spell it, and a budget.

    A marker is what its ids spell: it is found wherever that stands, whatever tokens spell it there. A control token
    is spelled by itself alone.

    Args:
        start: opens a block.
        ends: each closes a block.
        forced_end: what is emitted, whole, when the budget is spent. It may hold a phrase before and after the marker
            and must contain one of ``ends``.
        implicit_ends: each closes a block and is itself content, such as a tool-call opener.
        budget: reasoning tokens allowed in one block. 0 closes it at once, None and -1 set no limit.
        vocabulary: what ids spell.

    Raises:
        BadRequest: an empty or contradictory marker, a forced end without an end marker, any other budget.
    """

    start: Marker
    ends: tuple[Marker, ...]
    forced_end: Marker
    implicit_ends: tuple[Marker, ...] = ()
    budget: int | None = None
    vocabulary: Vocabulary = field(kw_only=True, repr=False)

    def __post_init__(self) -> None:
        width = len(self.vocabulary.tokens)
        fields = {
            "start": _marker("start", self.start, width),
            "ends": _markers("ends", self.ends, width),
            "forced_end": _marker("forced_end", self.forced_end, width),
            "implicit_ends": _markers("implicit_ends", self.implicit_ends, width),
            "budget": _budget(self.budget),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if not self.ends:
            raise BadRequest("ends: at least one end marker is needed, got none")
        ends = {self.vocabulary.spelled(end): end for end in self.ends}
        for implicit in self.implicit_ends:
            if both := ends.get(self.vocabulary.spelled(implicit)):
                raise BadRequest(f"implicit_ends: {list(both)} is also one of ends; a marker is content or it is not")
        _find_end(self)

    @property
    def matcher(self) -> MarkerMatcher:
        spelled = self.vocabulary.spelled
        ends, implicit_ends = (tuple(map(spelled, each)) for each in (self.ends, self.implicit_ends))
        return markers.matcher(self.vocabulary, spelled(self.start), ends, implicit_ends)

    @property
    def forced_marker(self) -> range:
        """Where in what ``forced_end`` spells its first end marker stands."""
        return _find_end(self)


@dataclass(frozen=True)
class PromptReading:
    """What a prompt leaves behind: is a block open (None: no marker at all), and how far into what."""

    block_open: bool | None
    node: int  # of the rule's matcher, so that a marker may straddle prompt and output
    spent: int  # reasoning tokens of the block that is open
    tail: tuple[int, ...] = ()  # symbols of the last of them, as far as they may be part of an end marker


def read_prompt(rule: ThinkingRule, prompt: Iterable[int]) -> PromptReading:
    """Find the phase a prompt ends in: its last marker wins.

    A start marker inside an open block begins that block anew, for a prompt may quote a marker without closing it.
    An implicit end counts only inside a block: outside, it is ordinary content (a template that describes tools), in
    which an end marker counts as anywhere else. The token that holds the end of a start marker is no reasoning token.
    """
    matcher, symbols_of = rule.matcher, rule.vocabulary.symbols
    nodes, plain = matcher.nodes, matcher.plain
    block_open: bool | None = None
    node, spent = ROOT, 0
    tail: tuple[int, ...] = ()
    for token in prompt:
        if node == ROOT and (token in plain or matcher.is_plain(token)):
            spent, tail = spent + 1, ()
            continue
        within, symbols = block_open, symbols_of(token)
        for symbol in symbols:
            node = nodes[node].next.get(symbol, ROOT)
            here = nodes[node]
            if here.closes if block_open else here.ends and not here.opens:
                block_open, within, node = False, False, ROOT
            elif here.opens:
                block_open, within, node, spent, tail = True, False, ROOT, 0, ()
        if within:
            spent, tail = spent + 1, reaching((*tail, len(symbols)), nodes[node].close_prefix)
    return PromptReading(block_open, node, spent if block_open else 0, tail if block_open else ())


def reaching(lengths: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The last of ``lengths``, as many as it takes to reach ``size`` symbols back."""
    if size == 0:
        return ()
    reached, count = 0, 0
    while reached < size and count < len(lengths):
        count += 1
        reached += lengths[-count]
    return lengths[-count:]


def _find_end(rule: ThinkingRule) -> range:
    spelled = rule.vocabulary.spelled
    forced_end = spelled(rule.forced_end)
    found = [
        range(begin, begin + len(end))
        for end in map(spelled, rule.ends)
        for begin in range(len(forced_end) - len(end) + 1)
        if forced_end[begin : begin + len(end)] == end
    ]
    if not found:
        raise BadRequest(
            f"forced_end: must contain one of ends {[list(end) for end in rule.ends]}, or the block would never close; "
            f"got {quoted(list(rule.forced_end))}. Append an end marker"
        )
    return min(found, key=lambda place: (place.stop, place.start))


def _markers(name: str, value: Any, width: int) -> tuple[Marker, ...]:
    try:
        items = list(value)
    except TypeError:
        items = [value]
    return tuple(_marker(f"{name}[{index}]", item, width) for index, item in enumerate(items))


def _marker(name: str, value: Any, width: int) -> Marker:
    try:
        marker = tuple(_integer(token) for token in value)
    except TypeError:
        raise BadRequest(f"{name}: a marker is a sequence of token ids, got {quoted(value)}") from None
    if not marker or min(marker) < 0:
        raise BadRequest(f"{name}: a marker is a non-empty sequence of token ids >= 0, got {quoted(value)}")
    if max(marker) >= width:
        raise BadRequest(f"{name}: token ids must be in 0..{width - 1}, got {quoted(list(marker))}")
    return marker


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
        raise TypeError("a truth value is not a number here")
    return operator.index(value)
