"""Detokenize a request incrementally: whole characters only, and never text that a stop string may still remove."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders

ROOT = 0
_MOST_UNDECODED = 64  # tokens; decoding more at once would delay other requests


@dataclass(frozen=True)
class TextDelta:
    """Text that became final since the last delta."""

    reasoning: str = ""
    text: str = ""


class StopMatcher:
    """Find the first stop string that a growing text completes; of several completed at once, the longest.

    An Aho-Corasick automaton over characters. Every failure link followed undoes one earlier step forward, so a
    character costs one or two steps on average, whatever the number of stop strings. A node stands for the longest
    suffix of the text that is a prefix of a stop string. The matcher is immutable once built. Reasoning delimiters are
    matched over tokens instead (runtime/constraints/delimiters.py).
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [ROOT]  # failure links
        self.depth = [0]  # characters of the node's prefix
        self.found: list[str | None] = [None]  # the longest stop string that ends at the node
        for stop in stops:
            self._insert(stop)
        self._link()

    @property
    def any(self) -> bool:
        """Whether there is any stop string."""
        return len(self.found) > 1

    def step(self, node: int, character: str) -> int:
        """Return the node that follows ``node`` after ``character``."""
        while character not in self._next[node]:
            if node == ROOT:
                return ROOT
            node = self._shorter[node]
        return self._next[node][character]

    def _insert(self, stop: str) -> None:
        node = ROOT
        for character in stop:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._shorter.append(ROOT)
                self.depth.append(self.depth[node] + 1)
                self.found.append(None)
            node = self._next[node][character]
        self.found[node] = stop

    def _link(self) -> None:
        """Set the failure links breadth first, so that shorter prefixes are linked before longer ones."""
        pending = deque(self._next[ROOT].values())
        while pending:
            node = pending.popleft()
            for character, child in self._next[node].items():
                self._shorter[child] = self.step(self._shorter[node], character)
                self.found[child] = self.found[child] or self.found[self._shorter[child]]
                pending.append(child)


class Detokenizer:
    """Detokenize one sequence of tokens incrementally.

    Attributes:
        text: everything decoded so far.
        released: number of characters of ``text`` that are final. The rest may be the beginning of a stop string.
        stopped_by: the stop string that ended the text, or None.

    Tokens are decoded in groups that end with a whole character. Each group is decoded together with the group before
    it, because decoders join their input (spaces, bytes). tokenizers' DecodeStream does the same, but raises if a
    decoder changes earlier characters: byte fallback replaces the text of a run of byte tokens once the run turns out
    not to be UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, stops: StopMatcher, *, skip_special: bool = True) -> None:
        self.text = ""
        self.released = 0
        self.stopped_by: str | None = None
        self._taken = 0  # characters that ``take`` has returned
        self._tokenizer = tokenizer
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._skip_special = skip_special
        self._stops = stops
        self._node = ROOT  # of the matcher, at the end of the text
        self._context: list[int] = []  # the last group that added text
        self._context_text = ""  # the context, decoded alone
        self._group: list[int] = []  # tokens that follow the context

    def push(self, token_ids: Sequence[int], *, include_stop: bool) -> int:
        """Add tokens up to the one that completes a stop string, and return the number of tokens added.

        The first stop string cuts the text and sets ``stopped_by``. The text keeps the stop string if ``include_stop``.
        """
        if self._push_all(token_ids):
            return len(token_ids)
        for count, token_id in enumerate(token_ids, 1):
            self._group.append(token_id)
            self._extend(self._decode_group(partial=False), include_stop=include_stop)
            if self.stopped_by is not None:
                return count
        return len(token_ids)

    def finish(self) -> None:
        """Release all text, the bytes of an incomplete character (as U+FFFD) included."""
        if self.stopped_by is None and self._group:
            self.text += self._decode_group(partial=True)
        self.released = len(self.text)
        self._node = ROOT

    def take(self) -> str:
        """Return the text that was released since the last call."""
        new = self.text[self._taken : self.released]
        self._taken = max(self._taken, self.released)
        return new

    def _push_all(self, token_ids: Sequence[int]) -> bool:
        """Decode all tokens in one call if that gives the same text; return whether it does.

        It does if the decoder maps tokens to bytes without regard to context, the tokens end with a whole character,
        and they complete no stop string.
        """
        if not self._byte_level:
            return False
        text, node = self._decode([*self._group, *token_ids]), self._node
        if not text or text.endswith("\ufffd"):
            return False
        for character in text if self._stops.any else "":
            node = self._stops.step(node, character)
            if self._stops.found[node] is not None:
                return False
        self._node = node
        self.text += text
        self.released = len(self.text) - self._stops.depth[node]
        self._context, self._group, self._context_text = [], [], ""
        return True

    def _decode_group(self, *, partial: bool) -> str:
        """Return the text that the group adds: none while it ends in a partial character, unless ``partial``."""
        text = self._decode(self._context + self._group)
        if text.endswith("\ufffd") and not partial:
            return ""
        context_changed = not text.startswith(self._context_text)
        added = self._decode(self._group) if context_changed else text[len(self._context_text) :]
        if added:
            self._context, self._group = self._group, []
            self._context_text = self._decode(self._context)
        return added

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special))

    def _extend(self, added: str, *, include_stop: bool) -> None:
        begin = len(self.text)
        self.text += added
        for end, character in enumerate(added, start=begin + 1):
            self._node = self._stops.step(self._node, character)
            self.stopped_by = self._stops.found[self._node]
            if self.stopped_by is not None:  # the first completed one, so that tokenization does not matter
                self.text = self.text[: end if include_stop else end - len(self.stopped_by)]
                self.released = len(self.text)
                return
        self.released = len(self.text) - self._stops.depth[self._node]


class TextStream:
    """The text of a request, split into reasoning and answer. Only answers have stop strings: reasoning may quote them.

    Attributes:
        stops: whether there are stop strings, so that each token may end the text.
        tokens: number of tokens added, reasoning delimiters included.
        reasoning_tokens: number of those that are reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        matchers = {"reasoning": StopMatcher(()), "answer": StopMatcher(stops)}
        self._detokenizers = {
            kind: Detokenizer(tokenizer, matcher, skip_special=skip_special) for kind, matcher in matchers.items()
        }
        self.stops = matchers["answer"].any
        self._include_stop = include_stop
        self._kind = ""  # of the newest tokens
        self._undecoded: list[int] = []  # tokens of that kind; without stop strings their text can wait
        self.tokens = 0
        self.reasoning_tokens = 0

    @property
    def text(self) -> str:
        self._decode()
        return self._detokenizers["answer"].text

    @property
    def reasoning(self) -> str:
        self._decode()
        return self._detokenizers["reasoning"].text

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None."""
        return next((d.stopped_by for d in self._detokenizers.values() if d.stopped_by is not None), None)

    def add(self, kind: str, token_ids: Sequence[int], inner: Collection[int] = ()) -> bool:
        """Add tokens of one role: reasoning, answer or delimiter. Return whether the text has ended.

        ``inner`` holds the indices of tokens that continue a token counted before. Tokens after a completed stop string
        are not counted. Text of the other kind is finished: all of it is released, and a stop string does not continue
        across the change of kind.
        """
        if kind != self._kind:
            self._decode()
            self._kind = kind
            for other in self._detokenizers:
                if other != kind:
                    self._detokenizers[other].finish()
        detokenizer, count = self._detokenizers.get(kind), len(token_ids)  # delimiters belong to neither text
        if detokenizer is not None and self.stops:
            count = detokenizer.push(token_ids, include_stop=self._include_stop)
        elif detokenizer is not None:
            self._undecoded += token_ids
            if len(self._undecoded) >= _MOST_UNDECODED:
                self._decode()
        counted = count - sum(index < count for index in inner)
        self.tokens += counted
        self.reasoning_tokens += counted if kind == "reasoning" else 0
        return detokenizer is not None and detokenizer.stopped_by is not None

    def finish(self) -> None:
        """Release all text."""
        self._decode()
        for detokenizer in self._detokenizers.values():
            detokenizer.finish()

    def take(self) -> TextDelta:
        """Return the text that was released since the last call."""
        self._decode()
        return TextDelta(self._detokenizers["reasoning"].take(), self._detokenizers["answer"].take())

    def _decode(self) -> None:
        tokens, self._undecoded = self._undecoded, []
        if tokens:
            self._detokenizers[self._kind].push(tokens, include_stop=self._include_stop)
