"""Reasoning delimiters: texts that open or close a reasoning block, found across token boundaries.

One Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", 1975) holds all delimiters of a rule. Its
transitions are complete, so a symbol (a byte or a control token; engines/text/vocabulary.py) costs one dictionary
look-up. The state is a node index, so a lookahead copies one integer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import pack

import numpy as np

from tandemrt.engines.text.vocabulary import Vocabulary

Delimiter = tuple[int, ...]

ROOT = 0


@dataclass(frozen=True)
class EndDelimiter:
    """An end delimiter. An *implicit* one ends the reasoning and is part of the answer, such as a tool-call opener."""

    symbols: Delimiter
    implicit: bool


@dataclass
class MatcherNode:
    """A state of the automaton: ``path`` is the longest suffix of the text that begins a delimiter."""

    path: Delimiter
    next: dict[int, int] = field(default_factory=dict)  # node by symbol; other symbols lead to ROOT
    opens: bool = False  # the start delimiter is complete here
    closes: EndDelimiter | None = None  # the longest end delimiter that is complete here
    ends: bool = False  # an explicit end delimiter is complete here; `closes` may be a longer, implicit one
    open_prefix: int = 0  # symbols of the longest unfinished start delimiter at the end of `path`
    close_prefix: int = 0  # symbols of the longest unfinished end delimiter at the end of `path`


NO_DELIMITERS: Sequence[MatcherNode] = (MatcherNode(()),)


class DelimiterMatcher:
    """Find a start delimiter and several end delimiters in a text. Requests and threads may share a matcher.

    Delimiters do not share symbols: after one that opens or closes a block, matching continues from ``ROOT``.
    """

    def __init__(self, vocabulary: Vocabulary, start: Delimiter, closings: Sequence[EndDelimiter]) -> None:
        self.nodes: list[MatcherNode] = [MatcherNode(())]
        self._insert(start).opens = True
        for closing in closings:
            node = self._insert(closing.symbols)
            node.closes, node.ends = closing, not closing.implicit
        self._number_prefixes(start, [closing.symbols for closing in closings])
        self.first = frozenset(self.nodes[ROOT].next)  # the first symbols of all delimiters
        self._may_begin = bytearray(b"\1") * len(vocabulary.tokens)  # by token; what no text had before, may
        self._complete()
        self._vocabulary = vocabulary
        self._start = start
        self._ends = [closing.symbols for closing in closings]
        self._holding = frozenset(token for end in self._ends for token in vocabulary.tokens_containing(end))
        self._closing = [self._closing_after(node) for node in self.nodes]

    def read(self, prompt: Sequence[int]) -> "PromptReading":
        """Return the state at the end of a prompt. The last delimiter decides it.

        A start delimiter inside an open block begins the block again, because a prompt may quote a delimiter without
        closing it. An implicit end closes an open block. Outside a block it is ordinary text, as in a template that
        describes tools. The token that completes a start delimiter is not a reasoning token.
        """
        nodes, symbols_of, length = self.nodes, self._vocabulary.symbols, len(prompt)
        beginnings = self._beginnings(prompt)
        if not beginnings:
            return PromptReading(None, ROOT, 0)
        block_open: bool | None = None
        node, spent, position = ROOT, 0, 0
        tail: tuple[int, ...] = ()
        for begin in beginnings:
            if begin > position:  # the tokens between lead from ROOT to ROOT
                spent, tail, position = spent + begin - position, (), begin
            while position == begin or (node != ROOT and position < length):
                within, symbols = block_open, symbols_of(prompt[position])
                position += 1
                for symbol in symbols:
                    node = nodes[node].next.get(symbol, ROOT)
                    here = nodes[node]
                    if here.closes if block_open else here.ends and not here.opens:
                        block_open, within, node = False, False, ROOT
                    elif here.opens:
                        block_open, within, node, spent, tail = True, False, ROOT, 0, ()
                if within:
                    spent, tail = spent + 1, last_tokens_covering((*tail, len(symbols)), nodes[node].close_prefix)
        if position < length:
            spent, tail = spent + length - position, ()
        return PromptReading(block_open, node, spent if block_open else 0, tail if block_open else ())

    def cannot_begin_delimiter(self, token: int) -> bool:
        """Return whether ``token`` contains no first symbol of a delimiter, so that it leads from ROOT to ROOT."""
        if not self._may_begin[token]:
            return True
        if not self.first.isdisjoint(self._vocabulary.symbols(token)):
            return False
        self._may_begin[token] = False
        return True

    def _beginnings(self, prompt: Sequence[int]) -> list[int]:
        """Return the places of the tokens that may begin a delimiter."""
        ids = np.frombuffer(pack(f"{len(prompt)}q", *prompt), np.int64)  # faster than from the list
        places = np.flatnonzero(np.frombuffer(self._may_begin, np.bool_)[ids]).tolist()
        return [place for place in places if not self.cannot_begin_delimiter(prompt[place])]

    def closing(self, node: int) -> frozenset[int]:
        """Return the tokens that may complete an end delimiter after ``node``; no other token completes one."""
        return self._closing[node]

    def opening(self, node: int, least: int) -> set[int]:
        """Return the tokens that may continue a start delimiter, of which the text has at least ``least`` symbols.

        ``node`` is the matcher's node at the end of that text.
        """
        token_ids: set[int] = set()
        for rest in _rests(self.nodes[node].path, self._start, least):
            token_ids.update(self._vocabulary.tokens_with_prefix(rest), self._vocabulary.tokens_that_prefix(rest))
        return token_ids

    def _closing_after(self, node: MatcherNode) -> frozenset[int]:
        rests = {rest for end in self._ends for rest in _rests(node.path, end, 1)}
        return self._holding.union(*map(self._vocabulary.tokens_with_prefix, rests))

    def _insert(self, delimiter: Delimiter) -> MatcherNode:
        node = self.nodes[ROOT]
        for length, symbol in enumerate(delimiter, 1):
            if symbol not in node.next:
                node.next[symbol] = len(self.nodes)
                self.nodes.append(MatcherNode(delimiter[:length]))
            node = self.nodes[node.next[symbol]]
        return node

    def _number_prefixes(self, start: Delimiter, ends: Sequence[Delimiter]) -> None:
        for delimiter in (start, *ends):
            node = self.nodes[ROOT]
            for length, symbol in enumerate(delimiter[:-1], 1):
                node = self.nodes[node.next[symbol]]
                if delimiter is start:
                    node.open_prefix = length
                else:
                    node.close_prefix = length

    def _complete(self) -> None:
        # Breadth first, so the node of the longest proper suffix (`fail`) is complete before the node itself.
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


@dataclass(frozen=True)
class PromptReading:
    """The state at the end of a prompt. ``block_open`` is None if the prompt contains no delimiter."""

    block_open: bool | None
    node: int  # node of the matcher; a delimiter may begin in the prompt and end in the output
    spent: int  # reasoning tokens of the open block
    tail: tuple[int, ...] = ()  # symbols per token, for the last tokens that may belong to an end delimiter


def matcher(
    vocabulary: Vocabulary, start: Delimiter, ends: tuple[Delimiter, ...], implicit_ends: tuple[Delimiter, ...]
) -> DelimiterMatcher:
    """Return the automaton of a rule; requests with the same delimiters share it."""
    key = (matcher, start, ends, implicit_ends)
    delimiter_matcher: DelimiterMatcher | None = vocabulary.derived.get(key)
    if delimiter_matcher is None:
        closings = [EndDelimiter(end, implicit=False) for end in ends] + [
            EndDelimiter(end, implicit=True) for end in implicit_ends
        ]
        delimiter_matcher = vocabulary.derived[key] = DelimiterMatcher(vocabulary, start, closings)
    return delimiter_matcher


def last_tokens_covering(lengths: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the shortest tail of ``lengths`` whose sum is at least ``size`` symbols, or all of ``lengths``."""
    if size == 0:
        return ()
    reached, count = 0, 0
    while reached < size and count < len(lengths):
        count += 1
        reached += lengths[-count]
    return lengths[-count:]


def _rests(path: Delimiter, delimiter: Delimiter, least: int) -> list[Delimiter]:
    """Return the parts of ``delimiter`` that complete it after ``path``.

    One part for each way in which ``path`` ends with ``least`` or more, but not all, of its first symbols.
    """
    most = min(len(path), len(delimiter) - 1)
    return [delimiter[size:] for size in range(least, most + 1) if path[len(path) - size :] == delimiter[:size]]
