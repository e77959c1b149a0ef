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
        self._hits: dict[int, tuple[float, float]] = {}  # by bits of the length: hits and predictions, with decay

    def read(self, text: Sequence[int], prompt: int) -> None:
        """Read what ``text`` has gained since the last call. The tokens of its ``prompt`` are not predicted."""
        for token in text[len(self._text) :]:
            if len(self._text) >= prompt:
                self._count_hit(token)
                self._match = self._append(token)
            else:
                self._text.append(token)
                if len(self._text) == prompt:
                    self._match = self._search()
            self._index()

    def copy(self, most: int, following: Sequence[int] = ()) -> Copy:
        """Copy at most ``most`` tokens after the text and ``following``, as far as they are likely to be accepted."""
        length, match, left = len(self._text), self._match, self._left
        for token in following:
            self._match = self._append(token)
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

    def _append(self, token: int) -> _Match | None:
        """Append ``token``; return the match that predicts the token after it."""
        match = self._match
        predicted = None if match is None else self._text[match.position]
        self._text.append(token)
        if match is None:
            return self._search()
        if predicted == token:
            return _Match(match.position + 1, match.length + 1)
        if match.length >= _LONG:
            self._left = match.position
        return self._return() or self._search() or _Match(match.position + 1, 0)

    def _return(self) -> _Match | None:
        """Return the nearest place after the one that the text has left where its newest token is."""
        text, left = self._text, self._left
        near = () if left is None else range(left, min(left + _NEAR, len(text) - 1))
        return next((_Match(position + 1, _LONG) for position in near if text[position] == text[-1]), None)

    def _search(self) -> _Match | None:
        """Return the longest of the latest matches. The n-gram at the end of the text must not be in the index yet."""
        text, best = self._text, None
        end = self._latest.get(tuple(text[-self._shortest :]), 0)
        for _ in range(_TRIED):
            if not end:
                break
            length = self._shortest
            while length < min(end, self._longest) and text[end - length - 1] == text[-length - 1]:
                length += 1
            if best is None or length > best.length:
                best = _Match(end, length)
            end = self._earlier[end]
        return best

    def _index(self) -> None:
        ngram = tuple(self._text[-self._shortest :])
        self._earlier.append(self._latest.get(ngram, 0))
        if len(ngram) == self._shortest:
            self._latest[ngram] = len(self._text)

    def _count_hit(self, token: int) -> None:
        if self._match is None:
            return
        bits, hit = self._bits(self._match.length), self._text[self._match.position] == token
        hits, predictions = self._hits.get(bits, (0.0, 0.0))
        self._hits[bits] = _DECAY * hits + hit, _DECAY * predictions + 1

    def _chance(self, length: int) -> float:
        """Return the chance that a match of ``length`` tokens predicts the next one."""
        bits = self._bits(length)
        hits, predictions = self._hits.get(bits, (0.0, 0.0))
        return (hits + _PRIOR_WEIGHT * _CHANCES[bits]) / (predictions + _PRIOR_WEIGHT)

    def _bits(self, length: int) -> int:
        return min(length.bit_length(), len(_CHANCES) - 1)
