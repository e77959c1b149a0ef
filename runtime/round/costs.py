"""What rounds take, by their rows and windows."""

from collections.abc import Sequence
from dataclasses import dataclass

GUESS = 0.25  # the cost of a drafted token before it was timed, in rounds without drafts
_FIRST = 2  # rounds of a shape that it is known by before anything is compared with it: the least of them
_MOST_ASKED = 20  # rounds that are asked for: of some, prompts' or those that wait, no time is noted
_AGAIN = 1000  # rounds of as many rows, after which a window that none of them had is timed anew
_STEP = 1.1  # how much longer or shorter a round counts at most: pauses of a machine are none of its windows'
_LEVEL, _OWN = 0.6, 0.1  # how far every window's cost goes there, of as many rows, and how far beyond its own
_SHORTER = 2.0  # times that for a shorter round: where the machine is busy, what a third of the rounds take counts


@dataclass
class _Timing:
    """Of a shape: how many rounds were ``asked`` for to time it, how many were ``noted``, and ``newest``, the last."""

    asked: int = 0
    noted: int = 0
    newest: int = 0


class RoundCosts:
    """Seconds of rounds; only their quotients mean anything.

    What changes while a bundle is open, changes for all windows of as many rows: texts grow, others take the machine.
    So a round that takes longer than its like makes all windows dearer, and its own a little more; else the window that
    is in use would look dear beside those whose last round was long ago. (Steps are taken in the logarithm.)
    """

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, float]] = {}
        self._timings: dict[int, dict[int, _Timing]] = {}
        self._rounds: dict[int, int] = {}  # by rows
        self._measured: set[int] = set()  # rows of rounds that the opening timed

    def due(self, batch: int, windows: Sequence[int]) -> int | None:
        """Which of ``windows`` the next round of ``batch`` rows should have, to be timed. None: each is known.

        Without it a window that seemed dear once would never be seen again.
        """
        if batch in self._measured:
            return None
        now = self._rounds[batch] = self._rounds.get(batch, 0) + 1
        for window in windows:
            timing = self._timing(batch, window)
            if now - timing.newest > _AGAIN:
                timing.asked, timing.noted = 0, 1  # its calls are bound
                timing.newest = now
            if timing.noted <= _FIRST and timing.asked < _MOST_ASKED:
                timing.asked += 1
                return window
        return None

    def note(self, batch: int, window: int, seconds: float) -> None:
        """A round of ``batch`` rows and ``window`` drafted tokens took ``seconds``.

        The first one of a shape does not count: calls are bound in it. Nor does, of the first, a window that takes
        longer than its tokens one by one. Nor any where the opening timed all windows side by side.
        """
        if batch in self._measured:
            return
        timing, known = self._timing(batch, window), self._seconds.setdefault(batch, {})
        timing.noted += 1
        timing.newest = self._rounds.get(batch, 0)
        if timing.noted == 1:
            return
        if timing.noted <= 1 + _FIRST:
            if 0 in known:
                seconds = min(seconds, (1 + window) * known[0])
            known[window] = seconds if timing.noted == 2 else min(seconds, known[window])
            return
        longer = min(_STEP, max(1 / _STEP, seconds / known[window]))
        step = _SHORTER if longer < 1 else 1.0
        for each in known:
            known[each] *= longer ** (step * (_LEVEL + _OWN * (each == window)))

    def measured(self, batch: int, window: int, seconds: float) -> None:
        """A round of ``batch`` rows and ``window`` drafted tokens takes ``seconds``, as the opening timed it."""
        self._measured.add(batch)
        self._seconds.setdefault(batch, {})[window] = seconds

    def of(self, batch: int, window: int) -> float:
        """The cost of a round of ``batch`` rows and ``window`` drafted tokens; between what is known, a line."""
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

    def _timing(self, batch: int, window: int) -> _Timing:
        return self._timings.setdefault(batch, {}).setdefault(window, _Timing())
