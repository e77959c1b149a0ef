"""How long a window pays: what was accepted lately, against what a drafted token costs.

With a chance ``a_i`` that the i-th drafted token is accepted if those before it were, a window of k tokens emits
E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens. A round takes the window with the largest E(k) / cost(k), E summed
over its requests, because one window serves all of them.

The chances are counted per request and place over its last windows, and forgotten by and by, in favour of hope: so
drafts that were useless are tried again every few dozen rounds, and so are longer windows. The cost is what rounds of
as many rows and that window took when nothing disturbed them; a GPU is asked when the bundle opens (capture.py). What
no round has taken yet is guessed from the windows beside it.
"""

from collections.abc import Mapping, Sequence

MEMORY, MOST = 0.95, 12.0  # what remains of a count in the next round, and how many drafted tokens count at most
HOPE, FAITH = 0.9, 0.5  # the chance where nothing is known, and how many drafted tokens that belief is worth
LIKENESS = 1.0  # and how many the belief that a place in the window is as good as all places together
GUESS = 0.25  # the cost of a drafted token before it was measured, in rounds without drafts
_RISE = 1.02  # per round: what rounds take now becomes what they take at best


class _Count:
    """Drafted tokens that the target was asked about, and those of them that it accepted; old ones count less."""

    def __init__(self, tried: float = 0.0, accepted: float = 0.0) -> None:
        self.tried, self.accepted = tried, accepted

    def note(self, tried: float, accepted: float) -> None:
        tried += MEMORY * self.tried
        kept = min(1.0, MOST / tried) if tried else 1.0
        self.tried = kept * tried
        self.accepted = kept * (MEMORY * self.accepted + accepted)

    def chance(self, believed: float, worth: float) -> float:
        """Of a token to be accepted, where ``worth`` tokens' belief says ``believed``."""
        return (self.accepted + believed * worth) / (self.tried + worth)


class Acceptance:
    """What became of the drafts of one request lately."""

    def __init__(self) -> None:
        self._all = _Count(1.0, 1.0)  # the first window is a whole one
        self._places: list[_Count] = []
        self._emitted = [1.0]

    def note(self, accepted: int, asked: int) -> None:
        """In a round ``asked`` tokens were to be drafted, of which the first ``accepted`` came to stand.

        A token that was refused, by the target or a constraint, and one that could not be drafted end the window.
        """
        tried = accepted + (accepted < asked)
        self._all.note(tried, accepted)
        self._places += [_Count() for _ in range(tried - len(self._places))]
        for place, count in enumerate(self._places):
            count.note(place < tried, place < accepted)
        self._emitted = [1.0]

    @property
    def rate(self) -> float:
        """The chance that a drafted token is accepted, if those before it were; between 0 and 1."""
        return self._all.chance(HOPE, FAITH)

    def emitted(self, window: int) -> float:
        """How many tokens a round with ``window`` drafted ones is expected to emit."""
        while len(self._emitted) <= window:
            place = len(self._emitted) - 1
            reached = self._emitted[place] - (self._emitted[place - 1] if place else 0.0)
            rate = self.rate
            chance = self._places[place].chance(rate, LIKENESS) if place < len(self._places) else rate
            self._emitted.append(self._emitted[place] + reached * chance)
        return self._emitted[window]


class RoundCosts:
    """What rounds took, by their rows and windows."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, float]] = {}
        self._met: set[tuple[int, int]] = set()

    def note(self, batch: int, window: int, seconds: float) -> None:
        """A round of ``batch`` rows and ``window`` drafted tokens took ``seconds``.

        The first one of a shape does not count: calls are bound in it. Nor does a window that takes longer than its
        tokens one by one.
        """
        if (batch, window) not in self._met:
            self._met.add((batch, window))
            return
        known = self._seconds.setdefault(batch, {})
        if 0 in known:
            seconds = min(seconds, (1 + window) * known[0])
        known[window] = min(seconds, _RISE * known.get(window, seconds))

    def measured(self, batch: int, window: int, seconds: float) -> None:
        """A round of ``batch`` rows and ``window`` drafted tokens takes ``seconds``."""
        self._met.add((batch, window))
        self._seconds.setdefault(batch, {})[window] = seconds

    def of(self, batch: int, window: int) -> float:
        """The cost of a round of ``batch`` rows and ``window`` drafted tokens; only quotients mean anything."""
        known = self._seconds.get(batch, {})
        shorter = max((each for each in known if each <= window), default=None)
        longer = min((each for each in known if each >= window), default=None)
        if shorter is None and longer is None:
            return 1 + GUESS * window
        if shorter is None or longer is None:
            beside = longer if shorter is None else shorter
            assert beside is not None
            return known[beside] * (1 + GUESS * window) / (1 + GUESS * beside)
        if shorter == longer:
            return known[shorter]
        return known[shorter] + (known[longer] - known[shorter]) * (window - shorter) / (longer - shorter)


def best_window(acceptances: Sequence[Acceptance], costs: Mapping[int, float]) -> int:
    """Which window emits most tokens in its time, for requests whose drafts were accepted so lately.

    ``costs``: what a round with each window costs. Of equally good windows the shortest.
    """
    return max(sorted(costs), key=lambda window: sum(each.emitted(window) for each in acceptances) / costs[window])
