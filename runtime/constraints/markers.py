"""Markers: token sequences that open or close a reasoning block, found while tokens arrive one at a time.

One Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", 1975) over all markers of a rule, with its
transitions completed, so a token costs one dictionary look-up whatever came before. The state is an index: looking
ahead in a drafted window is copying an integer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

Marker = tuple[int, ...]

ROOT = 0


@dataclass(frozen=True)
class Closing:
    """An end marker. An *implicit* one ends the reasoning and is itself content, such as a tool-call opener."""

    tokens: Marker
    implicit: bool


@dataclass
class Node:
    """What is known after some tokens: the longest suffix of them that begins a marker stands at this node."""

    next: dict[int, int] = field(default_factory=dict)  # tokens that are not here lead to ROOT
    opens: bool = False  # the start marker is complete here
    closes: Closing | None = None  # the longest end marker that is complete here
    ends: bool = False  # an end marker that is no content is complete here; `closes` may be a longer one that is
    open_prefix: int = 0  # length of the longest unfinished start marker that ends here
    close_prefix: int = 0  # length of the longest unfinished end marker that ends here


NO_MARKERS: Sequence[Node] = (Node(),)


class MarkerMatcher:
    """Finds one start marker and any number of end markers. Immutable once built; share it freely.

    After a marker that counts, go on from ``ROOT``: markers do not share tokens.
    """

    def __init__(self, start: Marker, closings: Sequence[Closing]) -> None:
        self.nodes: list[Node] = [Node()]
        self._insert(start).opens = True
        for closing in closings:
            node = self._insert(closing.tokens)
            node.closes, node.ends = closing, not closing.implicit
        self._number_prefixes(start, [closing.tokens for closing in closings])
        self._complete()

    def step(self, node: int, token: int) -> int:
        """Return the node after ``token``."""
        return self.nodes[node].next.get(token, ROOT)

    def _insert(self, marker: Marker) -> Node:
        node = self.nodes[ROOT]
        for token in marker:
            if token not in node.next:
                node.next[token] = len(self.nodes)
                self.nodes.append(Node())
            node = self.nodes[node.next[token]]
        return node

    def _number_prefixes(self, start: Marker, ends: Sequence[Marker]) -> None:
        for marker in (start, *ends):
            node = self.nodes[ROOT]
            for length, token in enumerate(marker[:-1], 1):
                node = self.nodes[node.next[token]]
                if marker is start:
                    node.open_prefix = length
                else:
                    node.close_prefix = length

    def _complete(self) -> None:
        # Breadth first: when a node is reached, its longest proper suffix (`fail`) is complete already.
        fail = dict.fromkeys(self.nodes[ROOT].next.values(), ROOT)
        queue = list(fail)
        for index in queue:
            node, shorter = self.nodes[index], self.nodes[fail[index]]
            for token, child in node.next.items():
                fail[child] = shorter.next.get(token, ROOT)
                queue.append(child)
            node.opens = node.opens or shorter.opens
            node.closes = node.closes or shorter.closes
            node.ends = node.ends or shorter.ends
            node.open_prefix = node.open_prefix or shorter.open_prefix
            node.close_prefix = node.close_prefix or shorter.close_prefix
            node.next = shorter.next | node.next


@lru_cache(maxsize=256)
def matcher(start: Marker, ends: tuple[Marker, ...], implicit_ends: tuple[Marker, ...]) -> MarkerMatcher:
    """The automaton of a rule, built once for all requests that use the same markers."""
    closings = [Closing(end, implicit=False) for end in ends] + [Closing(end, implicit=True) for end in implicit_ends]
    return MarkerMatcher(start, closings)
