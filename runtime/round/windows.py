"""How many tokens a round drafts: one number, or a table by the requests that run."""

from collections.abc import Mapping, Sequence

from tandemrt.engines.errors import BadRequest
from tandemrt.engines.options import window_problem
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.adaptive import Acceptance, best_window
from tandemrt.runtime.round.costs import RoundCosts


class Windows:
    """The window of a round with ``live`` requests; hears who joins and leaves (SlotListener).

    ``windows`` is a number, or {requests: window}: each entry holds from its number of requests on, up to the next.
    None takes ``limit``, the bundle's window. Under the coupled rule the window changes no text, under the
    rejection rule no law, though a table then makes a text depend on how many others run.

    ``forced``: whether tokens that a constraint forces are drafted. ``drafts``: whether anything else is.
    ``masked``: whether drafts are masked by grammars.
    ``adaptive``: whether the window follows what is accepted (adaptive.py), up to what is said above.

    Raises BadRequest for a window outside 0..limit, or a table that says nothing about one request.
    """

    def __init__(
        self,
        windows: int | Mapping[int, int] | None,
        limit: int,
        *,
        forced: bool = True,
        drafts: bool = True,
        masked: bool = False,
        adaptive: bool = False,
    ) -> None:
        table = dict(windows) if isinstance(windows, Mapping) else {1: limit if windows is None else windows}
        if problem := window_problem(table, limit):
            raise BadRequest(f"window: {problem}")
        self._table = sorted(table.items(), reverse=True)
        self.largest = max(table.values())
        self.forced = forced
        self.masked = masked
        self.costs = RoundCosts()
        self._others = Acceptance()  # of those who left
        self._live: dict[int, Acceptance] = {}  # by slot
        self._drafts = drafts
        self.adaptive = adaptive and drafts

    def join(self, running: Running) -> None:
        """See SlotListener.join. A request begins with what others had accepted."""
        if not running.preemptions:
            running.acceptance = self._others.begin()
        self._live[running.slot] = running.acceptance

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        ended = self._live.pop(slot, None)
        if ended is not None:
            self._others.add(ended)

    def of(self, live: int) -> int:
        """The most drafted tokens of a round with ``live`` requests, at least one."""
        return next(window for least, window in self._table if live >= least)

    def drafted(
        self, acceptances: Sequence[Acceptance], batch: int, *, wanted: int | None = None, fixed: bool = False
    ) -> int:
        """How many tokens the drafter is asked for, for requests whose drafts were accepted so lately.

        ``batch``: rows of the round. ``wanted``: the longest window that any of them allows. ``fixed``: the window
        follows nothing.
        """
        if not self._drafts:
            return 0
        most = self.of(len(acceptances)) if wanted is None else min(wanted, self.of(len(acceptances)))
        if fixed or not self.adaptive or not most:
            return most
        steps = self._steps(most)
        due = self.costs.due(batch, steps)
        return best_window(acceptances, {step: self.costs.of(batch, step) for step in steps}) if due is None else due

    def usual(self, live: int) -> list[int]:
        """The windows of rounds with ``live`` requests without a window of their own, in which nothing is forced."""
        most = self.of(live)
        if not self._drafts:
            return [0]
        return self._steps(most) if self.adaptive and most else [most]

    def _steps(self, most: int) -> list[int]:
        """0, 1, 2, 3, 4, 6, 8, 12, ...: few, because each is a shape of its own for every number of rows."""
        powers = [1 << power for power in range(most.bit_length())]
        return sorted({0, most, *(window for power in powers for window in (power, 3 * power) if window < most)})
