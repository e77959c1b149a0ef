"""Estimates of how many drafted tokens are accepted, for adaptive draft windows.

If the i-th drafted token is accepted with probability a_i, given that the tokens before it were, a round with k drafted
tokens emits E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens. ``best_window`` returns the k with the largest
E(k) / cost(k). E is summed over the requests of the round, because all rows of a round share one window.

The probabilities are counted per request and position, and decay towards an optimistic prior. So useless drafts, and
longer windows, are tried again every few dozen rounds, less often where a drafted token costs more. A request starts
from the counts of earlier requests, because a text often ends before its own counts are reliable.
"""

from collections.abc import Mapping, Sequence

DECAY, MAX_TRIED = 0.98, 40.0  # decay of a count per round; maximum of a count, in drafted tokens
IDLE_DECAY = 0.97  # decay of a count in a round that does not draft its position; lower values explore too much
PRIOR, PRIOR_WEIGHT = 0.9, 0.5  # acceptance probability without counts, and its weight in drafted tokens
POSITION_WEIGHT = 0.7  # weight of the rate over all positions in the rate of one position, in drafted tokens
ENDED_DECAY = 0.9  # of the counts of ended requests when another request ends
START_TRIED = 1.2  # weight of ended requests in a new one, in drafted tokens: few, because it may differ from them


class _Count:
    """Drafted tokens that were verified (``tried``) and ``accepted``, with exponential decay."""

    def __init__(self, tried: float = 0.0, accepted: float = 0.0) -> None:
        self.tried, self.accepted = tried, accepted

    def observe(self, tried: float, accepted: float) -> None:
        decay = DECAY if tried else IDLE_DECAY
        self.tried, self.accepted = decay * self.tried + tried, decay * self.accepted + accepted
        if self.tried > MAX_TRIED:
            self.tried, self.accepted = MAX_TRIED, self.accepted * (MAX_TRIED / self.tried)

    def add(self, tried: float, accepted: float, decay: float) -> None:
        self.tried = decay * self.tried + tried
        self.accepted = decay * self.accepted + accepted

    def scaled_to(self, tried: float) -> "_Count":
        """Return a count with the same rate and at most ``tried`` tokens."""
        scale = min(1.0, tried / self.tried) if self.tried else 1.0
        return _Count(scale * self.tried, scale * self.accepted)

    def rate(self, prior: float, weight: float) -> float:
        """Return the acceptance probability, with a ``prior`` that counts as ``weight`` tokens."""
        return (self.accepted + prior * weight) / (self.tried + weight)


class Acceptance:
    """Recent acceptance of the drafts of one request, or of many. A new estimate favours the largest window."""

    def __init__(self) -> None:
        self._all = _Count(1.0, 1.0)
        self._positions: list[_Count] = []
        self._expected = [1.0]

    def start(self) -> "Acceptance":
        """Return the initial estimate of a new request; this estimate must be that of ended requests."""
        new = Acceptance()
        new._all = self._all.scaled_to(START_TRIED)
        new._positions = [count.scaled_to(START_TRIED) for count in self._positions]
        return new

    def merge(self, ended: "Acceptance") -> None:
        """Add the estimate of a request that ended."""
        self._all.add(ended._all.tried, ended._all.accepted, ENDED_DECAY)
        self._positions += [_Count() for _ in ended._positions[len(self._positions) :]]
        for position, count in enumerate(self._positions):
            other = ended._positions[position] if position < len(ended._positions) else _Count()
            count.add(other.tried, other.accepted, ENDED_DECAY)
        self._expected = [1.0]

    def observe(self, accepted: int, proposed: int) -> None:
        """Count a round that accepted the first ``accepted`` of ``proposed`` drafted tokens.

        A token that the target or a constraint rejects ends the window, and so does one that could not be drafted.
        """
        tried = accepted + (accepted < proposed)
        self._all.observe(tried, accepted)
        self._positions += [_Count() for _ in range(tried - len(self._positions))]
        for position, count in enumerate(self._positions):
            count.observe(position < tried, position < accepted)
        self._expected = [1.0]

    @property
    def tried(self) -> float:
        """Recent drafted tokens that were verified, and one of the prior."""
        return self._all.tried

    @property
    def rate(self) -> float:
        """The acceptance probability of a drafted token if those before it are accepted; between 0 and 1."""
        return self._all.rate(PRIOR, PRIOR_WEIGHT)

    def expected_tokens(self, window: int) -> float:
        """Return how many tokens a round with ``window`` drafted tokens is expected to emit, E(window)."""
        while len(self._expected) <= window:
            position = len(self._expected) - 1
            reached = self._expected[position] - (self._expected[position - 1] if position else 0.0)
            rate = self.rate
            if position < len(self._positions):
                rate = self._positions[position].rate(rate, POSITION_WEIGHT)
            self._expected.append(self._expected[position] + reached * rate)
        return self._expected[window]


def best_window(acceptances: Sequence[Acceptance], costs: Mapping[int, float]) -> int:
    """Return the window that emits most tokens per unit of time; the shortest of equals.

    ``costs``: the cost of a round by window.
    """
    return max(
        sorted(costs), key=lambda window: sum(each.expected_tokens(window) for each in acceptances) / costs[window]
    )
