"""The rule of a reasoning block: what opens it, what closes it, how long it may be, how it is closed by force."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.runtime.constraints import markers
from tandemrt.runtime.constraints.markers import ROOT, Marker, MarkerMatcher


@dataclass(frozen=True)
class ThinkingRule:
    """Markers as token-id sequences, and a budget.

    Args:
        start: opens a block.
        ends: each closes a block.
        forced_end: what is emitted, whole, when the budget is spent. It may hold a phrase before and after the marker
            and must contain one of ``ends``.
        implicit_ends: each closes a block and is itself content, such as a tool-call opener.
        budget: reasoning tokens allowed in one block. 0 closes it at once, None and -1 set no limit.

    Raises:
        BadRequest: an empty or contradictory marker, a forced end without an end marker, any other budget.
    """

    start: Marker
    ends: tuple[Marker, ...]
    forced_end: Marker
    implicit_ends: tuple[Marker, ...] = ()
    budget: int | None = None

    def __post_init__(self) -> None:
        fields = {
            "start": _marker("start", self.start),
            "ends": _markers("ends", self.ends),
            "forced_end": _marker("forced_end", self.forced_end),
            "implicit_ends": _markers("implicit_ends", self.implicit_ends),
            "budget": _budget(self.budget),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if not self.ends:
            raise BadRequest("ends: at least one end marker is needed, got none")
        for both in set(self.ends) & set(self.implicit_ends):
            raise BadRequest(f"implicit_ends: {list(both)} is also one of ends; a marker is content or it is not")
        _find_end(self.forced_end, self.ends)

    @property
    def matcher(self) -> MarkerMatcher:
        return markers.matcher(self.start, self.ends, self.implicit_ends)

    @property
    def forced_marker(self) -> range:
        """Where in ``forced_end`` its first end marker stands."""
        return _find_end(self.forced_end, self.ends)


@dataclass(frozen=True)
class PromptReading:
    """What a prompt leaves behind: is a block open (None: no marker at all), and how far into what."""

    block_open: bool | None
    node: int  # of the rule's matcher, so that a marker may straddle prompt and output
    spent: int  # reasoning tokens of the block that is open


def read_prompt(rule: ThinkingRule, prompt: Iterable[int]) -> PromptReading:
    """Find the phase a prompt ends in: its last marker wins.

    A start marker inside an open block begins that block anew, for a prompt may quote a marker without closing it.
    An implicit end counts only inside a block: outside, it is ordinary content (a template that describes tools), in
    which an end marker counts as anywhere else.
    """
    matcher = rule.matcher
    block_open, node, spent = None, ROOT, 0
    for token in prompt:
        node = matcher.step(node, token)
        here = matcher.nodes[node]
        if here.closes if block_open else here.ends and not here.opens:
            block_open, node, spent = False, ROOT, 0
        elif here.opens:
            block_open, node, spent = True, ROOT, 0
        elif block_open:
            spent += 1
    return PromptReading(block_open, node, spent)


def _find_end(forced_end: Marker, ends: Sequence[Marker]) -> range:
    found = [
        range(begin, begin + len(end))
        for end in ends
        for begin in range(len(forced_end) - len(end) + 1)
        if forced_end[begin : begin + len(end)] == end
    ]
    if not found:
        raise BadRequest(
            f"forced_end: must contain one of ends {[list(end) for end in ends]}, or the block would never close; "
            f"got {quoted(list(forced_end))}. Append an end marker"
        )
    return min(found, key=lambda place: (place.stop, place.start))


def _markers(name: str, value: Any) -> tuple[Marker, ...]:
    try:
        items = list(value)
    except TypeError:
        items = [value]
    return tuple(_marker(f"{name}[{index}]", item) for index, item in enumerate(items))


def _marker(name: str, value: Any) -> Marker:
    try:
        marker = tuple(_integer(token) for token in value)
    except TypeError:
        raise BadRequest(f"{name}: a marker is a sequence of token ids, got {quoted(value)}") from None
    if not marker or min(marker) < 0:
        raise BadRequest(f"{name}: a marker is a non-empty sequence of token ids >= 0, got {quoted(value)}")
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
