"""What rounds take, by their rows and windows."""

GUESS = 0.25  # the cost of a drafted token before it was measured, in rounds without drafts
_FIRST = 3  # rounds of a shape that it is known by before anything is compared with it: the least of them
_STEP = 1.1  # how much longer or shorter a round counts at most: pauses of a machine are none of its windows'
_LEVEL, _OWN = 0.6, 0.1  # how far every window's cost goes there, of as many rows, and how far beyond its own


class RoundCosts:
    """Seconds of rounds; only their quotients mean anything.

    What changes while a bundle is open, changes for all windows of as many rows: texts grow, others take the machine.
    So a round that takes longer than its like makes all windows dearer, and its own a little more; else the window that
    is in use would look dear beside those whose last round was long ago. (Steps are taken in the logarithm.)
    """

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, float]] = {}
        self._rounds: dict[tuple[int, int], int] = {}

    def note(self, batch: int, window: int, seconds: float) -> None:
        """A round of ``batch`` rows and ``window`` drafted tokens took ``seconds``.

        The first one of a shape does not count: calls are bound in it. Nor does, of the first, a window that takes
        longer than its tokens one by one.
        """
        rounds = self._rounds[batch, window] = self._rounds.get((batch, window), -1) + 1
        if not rounds:
            return
        known = self._seconds.setdefault(batch, {})
        if rounds > _FIRST:
            longer = min(_STEP, max(1 / _STEP, seconds / known[window]))
            for each in known:
                known[each] *= longer ** (_LEVEL + _OWN * (each == window))
            return
        if 0 in known:
            seconds = min(seconds, (1 + window) * known[0])
        known[window] = min(seconds, known.get(window, seconds))

    def measured(self, batch: int, window: int, seconds: float) -> None:
        """A round of ``batch`` rows and ``window`` drafted tokens takes ``seconds``."""
        self._rounds[batch, window] = _FIRST
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
