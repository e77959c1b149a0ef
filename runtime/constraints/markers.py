"""Markers: texts that open or close a reasoning block, found in what tokens spell, however they cut it.

One Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", 1975) over all markers of a rule, with its
transitions completed, so a symbol (a byte, or a control token; engines/vocabulary.py) costs one dictionary look-up
whatever came before. The state is an index: looking ahead in a drafted window is copying an integer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandemrt.engines.vocabulary import Vocabulary

Marker = tuple[int, ...]

ROOT = 0


@dataclass(frozen=True)
class Closing:
    """An end marker. An *implicit* one ends the reasoning and is itself content, such as a tool-call opener."""

    symbols: Marker
    implicit: bool


@dataclass
class Node:
    """What is known after some symbols: the longest suffix of them that begins a marker, which is ``path``."""

    path: Marker
    next: dict[int, int] = field(default_factory=dict)  # symbols that are not here lead to ROOT
    opens: bool = False  # the start marker is complete here
    closes: Closing | None = None  # the longest end marker that is complete here
    ends: bool = False  # an end marker that is no content is complete here; `closes` may be a longer one that is
    open_prefix: int = 0  # length of the longest unfinished start marker that ends here
    close_prefix: int = 0  # length of the longest unfinished end marker that ends here


NO_MARKERS: Sequence[Node] = (Node(()),)


class MarkerMatcher:
    """Finds one start marker and any number of end markers. Nothing of it changes what it finds; share it freely.

    After a marker that counts, go on from ``ROOT``: markers do not share symbols.
    """

    def __init__(self, vocabulary: Vocabulary, start: Marker, closings: Sequence[Closing]) -> None:
        self.nodes: list[Node] = [Node(())]
        self._insert(start).opens = True
        for closing in closings:
            node = self._insert(closing.symbols)
            node.closes, node.ends = closing, not closing.implicit
        self._number_prefixes(start, [closing.symbols for closing in closings])
        self.first = frozenset(self.nodes[ROOT].next)  # a token without these is plain: it leads from ROOT to ROOT
        self.plain: set[int] = set()  # such tokens, as far as texts had them
        self._complete()
        self._vocabulary = vocabulary
        self._start = start
        self._ends = [closing.symbols for closing in closings]
        self._holding = frozenset(token for end in self._ends for token in vocabulary.holding(end))
        self._closing = [self._closing_behind(node) for node in self.nodes]

    def is_plain(self, token: int) -> bool:
        """Whether ``token`` holds no symbol that a marker begins with."""
        if token in self.plain:
            return True
        if not self.first.isdisjoint(self._vocabulary.symbols(token)):
            return False
        self.plain.add(token)
        return True

    def closing(self, node: int) -> frozenset[int]:
        """The tokens in which an end marker may be completed behind ``node``; others complete none."""
        return self._closing[node]

    def opening(self, node: int, least: int) -> set[int]:
        """The tokens that may go on with a start marker of which at least ``least`` symbols lead to ``node``."""
        found: set[int] = set()
        for rest in _rests(self.nodes[node].path, self._start, least):
            found.update(self._vocabulary.beginning_with(rest), self._vocabulary.beginnings_of(rest))
        return found

    def _closing_behind(self, node: Node) -> frozenset[int]:
        rests = {rest for end in self._ends for rest in _rests(node.path, end, 1)}
        return self._holding.union(*map(self._vocabulary.beginning_with, rests))

    def _insert(self, marker: Marker) -> Node:
        node = self.nodes[ROOT]
        for length, symbol in enumerate(marker, 1):
            if symbol not in node.next:
                node.next[symbol] = len(self.nodes)
                self.nodes.append(Node(marker[:length]))
            node = self.nodes[node.next[symbol]]
        return node

    def _number_prefixes(self, start: Marker, ends: Sequence[Marker]) -> None:
        for marker in (start, *ends):
            node = self.nodes[ROOT]
            for length, symbol in enumerate(marker[:-1], 1):
                node = self.nodes[node.next[symbol]]
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
            for symbol, child in node.next.items():
                fail[child] = shorter.next.get(symbol, ROOT)
                queue.append(child)
            node.opens = node.opens or shorter.opens
            node.closes = node.closes or shorter.closes
            node.ends = node.ends or shorter.ends
            node.open_prefix = node.open_prefix or shorter.open_prefix
            node.close_prefix = node.close_prefix or shorter.close_prefix
            node.next = shorter.next | node.next


def matcher(
    vocabulary: Vocabulary, start: Marker, ends: tuple[Marker, ...], implicit_ends: tuple[Marker, ...]
) -> MarkerMatcher:
    """The automaton of a rule, built once for all requests that use the same markers."""
    key = (matcher, start, ends, implicit_ends)
    found: MarkerMatcher | None = vocabulary.derived.get(key)
    if found is None:
        closings = [Closing(end, implicit=False) for end in ends] + [
            Closing(end, implicit=True) for end in implicit_ends
        ]
        found = vocabulary.derived[key] = MarkerMatcher(vocabulary, start, closings)
    return found


def _rests(path: Marker, marker: Marker, least: int) -> list[Marker]:
    """What of ``marker`` may be missing behind ``path``, which holds at least ``least`` symbols of it."""
    most = min(len(path), len(marker) - 1)
    return [marker[size:] for size in range(least, most + 1) if path[len(path) - size :] == marker[:size]]
