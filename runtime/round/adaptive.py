"""How long a window pays: what was accepted lately, against what a drafted token costs.

With a chance ``a_i`` that the i-th drafted token is accepted if those before it were, a window of k tokens emits
E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens. A round takes the window with the largest E(k) / cost(k), E summed
over its requests, because one window serves all of them.

The chances are counted per request and place over its last windows, and forgotten by and by, in favour of hope: so
drafts that were useless are tried again every few dozen rounds, less often where a token costs more, and so are longer
windows. A request begins with what others had accepted, because a text is often over before its own windows say much.
The cost is what rounds of as many rows and that window take (costs.py); a GPU is asked when the bundle opens
(capture.py).
"""

from collections.abc import Mapping, Sequence

MEMORY, MOST = 0.95, 20.0  # what remains of a count when it goes on, and how many drafted tokens count at most
PATIENCE = 0.97  # what remains of it in a round without it: exploring costs more than it brings where it is less
HOPE, FAITH = 0.9, 0.5  # the chance where nothing is known, and how many drafted tokens that belief is worth
LIKENESS = 1.0  # and how many the belief that a place in the window is as good as all places together
OTHERS = 0.9  # what remains of what requests had accepted in the end, when the next one has ended
BEGINNING = 1.0  # how many drafted tokens of others a request begins with at most: one, it may be unlike them


class _Count:
    """Drafted tokens that the target was asked about, and those of them that it accepted; old ones count less."""

    def __init__(self, tried: float = 0.0, accepted: float = 0.0) -> None:
        self.tried, self.accepted = tried, accepted

    def note(self, tried: float, accepted: float) -> None:
        self.add(tried, accepted, MEMORY if tried else PATIENCE)
        part = min(1.0, MOST / self.tried) if self.tried else 1.0
        self.tried, self.accepted = part * self.tried, part * self.accepted

    def add(self, tried: float, accepted: float, memory: float) -> None:
        self.tried = memory * self.tried + tried
        self.accepted = memory * self.accepted + accepted

    def part(self, tried: float) -> "_Count":
        """As if only so many had been tried, at most."""
        part = min(1.0, tried / self.tried) if self.tried else 1.0
        return _Count(part * self.tried, part * self.accepted)

    def chance(self, believed: float, worth: float) -> float:
        """Of a token to be accepted, where ``worth`` tokens' belief says ``believed``."""
        return (self.accepted + believed * worth) / (self.tried + worth)


class Acceptance:
    """What became of the drafts of one request lately, or of many; at first a whole window seems best."""

    def __init__(self) -> None:
        self._all = _Count(1.0, 1.0)
        self._places: list[_Count] = []
        self._emitted = [1.0]

    def begin(self) -> "Acceptance":
        """That of a request that is new, where this one is what others had."""
        new = Acceptance()
        new._all = self._all.part(BEGINNING)
        new._places = [count.part(BEGINNING) for count in self._places]
        return new

    def add(self, ended: "Acceptance") -> None:
        """Take in what a request had in the end."""
        self._all.add(ended._all.tried, ended._all.accepted, OTHERS)
        self._places += [_Count() for _ in ended._places[len(self._places) :]]
        for place, count in enumerate(self._places):
            other = ended._places[place] if place < len(ended._places) else _Count()
            count.add(other.tried, other.accepted, OTHERS)
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


def best_window(acceptances: Sequence[Acceptance], costs: Mapping[int, float]) -> int:
    """Which window emits most tokens in its time, for requests whose drafts were accepted so lately.

    ``costs``: what a round with each window costs. Of equally good windows the shortest.
    """
    return max(sorted(costs), key=lambda window: sum(each.emitted(window) for each in acceptances) / costs[window])
