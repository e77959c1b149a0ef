"""The place of a text from which drafts are copied, and how far copies from there are likely to be accepted."""

from collections.abc import Sequence
from typing import NamedTuple

_TRIED = 16  # earlier occurrences that a search compares, the latest first
_LONG = 8  # tokens of a match to whose place a text may return; where it does, its newest token counts as so many
_NEAR = 8  # tokens after that place among which it returns
_LEAST_CHANCE = 0.25  # that a copied token is accepted: about what one more token adds to the cost of a round
_DECAY = 0.98  # of the counts of hits, per prediction
_CHANCES = (0.5, 0.5, 0.5, 0.6, 0.75, 0.9, 0.95)  # of a hit without counts, by the bits of the length of the match
_PRIOR_WEIGHT = 2.0  # of these chances, in predictions


class Copy(NamedTuple):
    """Copied ``tokens``, and how many of them are ``expected`` to be accepted."""

    tokens: list[int]
    expected: float


class _Match(NamedTuple):
    """``position`` of the token that is predicted to be the next one; ``length`` tokens before it match the newest.

    Where a text returns, one token matches and ``length`` starts at ``_LONG``: so it may return to this place, too.
    """

    position: int
    length: int


class CopySource:
    """Follows an earlier place of a growing text as long as it predicts the next token, and then searches another one.

    An edited text returns to the place that it left: where the newest token is among the next ones after a long match,
    the source continues there. Otherwise a search takes the longest of the latest occurrences of the newest
    ``shortest`` tokens; it compares up to ``longest``. If there is none, the source continues after the token that
    differed, with a length of 0. Hits are counted by length for all tokens of the output, copied or not. So copies that
    are rarely right end without being tried in rounds. Reading a token takes constant time.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._text: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # by n-gram of ``shortest`` tokens: the end of its latest one
        self._earlier = [0]  # by end of an n-gram: the end of the same one before it, or 0
        self._match: _Match | None = None
        self._left: int | None = None  # the position of the token that differed after a long match
        self._hits = [(0.0, 0.0)] * len(_CHANCES)  # by bits of the length: hits and predictions, with decay

    def read(self, text: Sequence[int], prompt: int) -> None:
        """Read what ``text`` has gained since the last call. The tokens of its ``prompt`` are not predicted."""
        known = len(self._text)
        if known < prompt:
            self._text += text[known:prompt]
            self._index(known + 1, prompt - 1)
            end = self._end()
            self._match = self._longest_of(end) if end else None
            self._index(prompt, prompt)
            known = prompt
        for token in text[known:]:
            self._read_one(token)

    def copy(self, most: int, following: Sequence[int] = ()) -> Copy:
        """Copy at most ``most`` tokens after the text and ``following``, as far as they are likely to be accepted."""
        length, match, left = len(self._text), self._match, self._left
        for token in following:
            self._text.append(token)
            self._match = self._next(self._match, self._end())
        copied = self._copy(most)
        del self._text[length:]
        self._match, self._left = match, left
        return copied

    def _copy(self, most: int) -> Copy:
        tokens: list[int] = []
        chance, expected = 1.0, 0.0
        while self._match is not None and len(tokens) < most:
            position, length = self._match.position + len(tokens), self._match.length + len(tokens)
            chance *= self._chance(length)
            if chance < _LEAST_CHANCE:
                break
            expected += chance
            beyond = position - len(self._text)  # a periodic text continues its period
            tokens.append(self._text[position] if beyond < 0 else tokens[beyond])
        return Copy(tokens, expected)

    def _next(self, match: _Match | None, end: int) -> _Match | None:
        """Return the match that predicts the token after the newest one, which ``match`` has predicted.

        ``end``: of the latest place before with the n-gram at the end of the text, or 0.
        """
        if match is not None:
            position, length = match
            if self._text[position] == self._text[-1]:
                return _Match(position + 1, length + 1)
            if length >= _LONG:
                self._left = position
            if self._left is not None and (returned := self._return(self._left)):
                return returned
            return self._longest_of(end) if end else _Match(position + 1, 0)
        return self._longest_of(end) if end else None

    def _return(self, left: int) -> _Match | None:
        """Return the nearest place after ``left``, which the text has left, where its newest token is."""
        text = self._text
        near = range(left, min(left + _NEAR, len(text) - 1))
        return next((_Match(position + 1, _LONG) for position in near if text[position] == text[-1]), None)

    def _end(self) -> int:
        """Return the end of the latest place with the n-gram at the end of the text, which is not in the index yet."""
        return self._latest.get(tuple(self._text[-self._shortest :]), 0)

    def _longest_of(self, end: int) -> _Match:
        """Return the longest of the latest matches, ``end`` among them, which is above 0."""
        text, best = self._text, _Match(0, 0)
        for _ in range(_TRIED):
            length = self._shortest
            while length < min(end, self._longest) and text[end - length - 1] == text[-length - 1]:
                length += 1
            if length > best.length:
                best = _Match(end, length)
            end = self._earlier[end]
            if not end or best.length >= self._longest:
                break
        return best

    def _index(self, first: int, last: int) -> None:
        """Index the n-grams of ``shortest`` tokens that end at ``first`` to ``last``, as numbers of tokens."""
        text, size, latest, earlier = self._text, self._shortest, self._latest, self._earlier
        for end in range(first, last + 1):
            if end < size:
                earlier.append(0)
                continue
            ngram = tuple(text[end - size : end])
            earlier.append(latest.get(ngram, 0))
            latest[ngram] = end

    def _read_one(self, token: int) -> None:
        """Read a ``token`` of the output, count whether it was predicted, and find the next match."""
        text, match = self._text, self._match
        if match is not None:
            bits, hit = self._bits(match.length), text[match.position] == token
            hits, predictions = self._hits[bits]
            self._hits[bits] = _DECAY * hits + hit, _DECAY * predictions + 1
        text.append(token)
        ngram = tuple(text[-self._shortest :])
        end = self._latest.get(ngram, 0)
        self._match = self._next(match, end)
        self._earlier.append(end)
        if len(ngram) == self._shortest:
            self._latest[ngram] = len(text)

    def _chance(self, length: int) -> float:
        """Return the chance that a match of ``length`` tokens predicts the next one."""
        bits = self._bits(length)
        hits, predictions = self._hits[bits]
        return (hits + _PRIOR_WEIGHT * _CHANCES[bits]) / (predictions + _PRIOR_WEIGHT)

    def _bits(self, length: int) -> int:
        return min(length.bit_length(), len(_CHANCES) - 1)
