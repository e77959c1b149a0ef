"""Measured duration of rounds by rows and draft window, for adaptive draft windows."""

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_TOKEN_COST = 0.25  # assumed cost of a drafted token, relative to a round without drafts
_FIRST_ROUNDS = 2  # timed rounds of a shape before it is compared with others; the shortest counts
_MAX_REQUESTED = 20  # rounds of a shape that `due` requests; rounds with prompts or waits are not timed
# Rounds of as many rows without a window, after which `due` requests it again: for the first time soon, because a busy
# host makes the first rounds of a batch slow.
_RETIME_SOON, _RETIME_AFTER = 32, 1000
_MAX_RATIO = 1.1  # by which a round counts as longer or shorter at most, so that a pause of the machine counts little
_SHARED_STEP, _OWN_STEP = 0.6, 0.1  # exponents of that ratio: for all windows of as many rows, and for its own
_SHORTER_FACTOR = 2.0  # on the exponents for a shorter round: on a busy machine the shortest third of rounds counts
_LEVEL_STEP = 0.05  # weight of a round in the level of calibrated rows
_MAX_LEVEL_RATIO = 1.5  # by which a round counts as longer at most there


@dataclass
class _Timing:
    """Rounds of one shape: how many were ``requested`` and ``timed``, and the number of the ``newest``.

    ``retimed``: whether it has been timed again.
    """

    requested: int = 0
    timed: int = 0
    newest: int = 0
    retimed: bool = False


class RoundCosts:
    """Estimated seconds per round, by rows and window. Only ratios between windows of equal rows are used.

    Longer texts and a busy machine change the cost of all windows. So a slower round raises the cost of all windows
    with the same number of rows, and that of its own window a little more. Otherwise the window in use would look
    expensive compared with windows that were timed long ago. Costs change in logarithmic steps.

    Calibrated rows were timed in every window when the bundle was opened, without texts. Cached tokens and the host's
    work make all windows slower by about the same time, their level, which rounds are observed for.
    """

    def __init__(self, token_cost: float | None = None) -> None:
        """``token_cost``: of a drafted token, relative to a round without drafts; None: rounds are timed to know it."""
        self._token_cost = DEFAULT_TOKEN_COST if token_cost is None else token_cost
        self._times_first = token_cost is None
        self._seconds: dict[int, dict[int, float]] = {}
        self._timings: dict[int, dict[int, _Timing]] = {}
        self._rounds: dict[int, int] = {}  # by rows
        self._levels: dict[int, float] = {}  # by calibrated rows: seconds that rounds take longer than they were timed

    def due(self, batch: int, windows: Sequence[int]) -> int | None:
        """Return which of ``windows`` to time in the next round of ``batch`` rows; None if enough are timed.

        The two shortest are timed first, because long useless drafts are slow, and each again soon and then after many
        rounds: a window that looked expensive once would otherwise never be used again. Others follow from these until
        they are used.
        """
        if batch in self._levels or not self._times_first:
            return None
        now = self._rounds[batch] = self._rounds.get(batch, 0) + 1
        for window in windows:
            timing = self._timing(batch, window)
            soon = timing.timed and not timing.retimed
            if now - timing.newest > (_RETIME_SOON if soon else _RETIME_AFTER):
                timing.requested, timing.timed = 0, 1  # its calls are bound
                timing.newest, timing.retimed = now, True
            needed = timing.timed or window in windows[:2]
            if needed and timing.timed <= _FIRST_ROUNDS and timing.requested < _MAX_REQUESTED:
                timing.requested += 1
                return window
        return None

    def observe(self, batch: int, window: int, seconds: float) -> None:
        """Record that a round of ``batch`` rows and ``window`` drafted tokens took ``seconds``.

        The first round of a shape binds its calls and does not count. In the first timed rounds, a window costs at most
        as much as its tokens one by one.
        """
        if batch in self._levels:
            expected = self.estimate(batch, window)
            self._levels[batch] += _LEVEL_STEP * (min(seconds, _MAX_LEVEL_RATIO * expected) - expected)
            return
        timing, known = self._timing(batch, window), self._seconds.setdefault(batch, {})
        timing.timed += 1
        timing.newest = self._rounds.get(batch, 0)
        if timing.timed == 1:
            return
        if timing.timed <= 1 + _FIRST_ROUNDS:
            if 0 in known:
                seconds = min(seconds, (1 + window) * known[0])
            known[window] = seconds if timing.timed == 2 else min(seconds, known[window])
            return
        ratio = min(_MAX_RATIO, max(1 / _MAX_RATIO, seconds / known[window]))
        factor = _SHORTER_FACTOR if ratio < 1 else 1.0
        for each in known:
            known[each] *= ratio ** (factor * (_SHARED_STEP + _OWN_STEP * (each == window)))

    def calibrate(self, batch: int, window: int, seconds: float) -> None:
        """Set the cost of a round of ``batch`` rows and ``window`` drafted tokens, timed when the bundle was opened."""
        self._levels.setdefault(batch, 0.0)
        self._seconds.setdefault(batch, {})[window] = seconds

    def is_timed(self, batch: int) -> bool:
        """Whether rounds of ``batch`` rows have been timed with two windows, so that the cost of a token is known."""
        return len(self._seconds.get(batch, {})) >= 2

    def estimate(self, batch: int, window: int) -> float:
        """Return the cost of a round of ``batch`` rows and ``window`` drafted tokens.

        It is interpolated between timed windows, or continues the line through the two longest of them.
        """
        known = self._seconds.get(batch, {})
        shorter = max((each for each in known if each <= window), default=None)
        longer = min((each for each in known if each >= window), default=None)
        if shorter is None and longer is None:
            return 1 + self._token_cost * window
        level = self._levels.get(batch, 0.0)
        if longer is None and len(known) >= 2:
            before, last = sorted(known)[-2:]
            token = max(0.0, known[last] - known[before]) / (last - before)
            return known[last] + token * (window - last) + level
        if shorter is None or longer is None:
            nearest = longer if shorter is None else shorter
            assert nearest is not None
            return known[nearest] * (1 + self._token_cost * window) / (1 + self._token_cost * nearest)
        if shorter == longer:
            return known[shorter] + level
        return known[shorter] + (known[longer] - known[shorter]) * (window - shorter) / (longer - shorter) + level

    def _timing(self, batch: int, window: int) -> _Timing:
        return self._timings.setdefault(batch, {}).setdefault(window, _Timing())
