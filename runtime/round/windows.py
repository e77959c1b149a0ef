"""How many tokens a round drafts: one number, or a table by the requests that run."""

from collections.abc import Mapping

from tandemrt.engines.errors import BadRequest
from tandemrt.engines.options import window_problem


class Windows:
    """The window of a round with ``live`` requests.

    ``windows`` is a number, or {requests: window}: each entry holds from its number of requests on, up to the next.
    None takes ``limit``, the bundle's window. Under the coupled rule the window changes no text, under the
    rejection rule no law, though a table then makes a text depend on how many others run.

    ``forced``: whether tokens that a constraint forces are drafted. ``drafts``: whether anything else is.

    Raises BadRequest for a window outside 0..limit, or a table that says nothing about one request.
    """

    def __init__(
        self, windows: int | Mapping[int, int] | None, limit: int, *, forced: bool = True, drafts: bool = True
    ) -> None:
        table = dict(windows) if isinstance(windows, Mapping) else {1: limit if windows is None else windows}
        if problem := window_problem(table, limit):
            raise BadRequest(f"window: {problem}")
        self._table = sorted(table.items(), reverse=True)
        self.largest = max(table.values())
        self.forced = forced
        self._drafts = drafts

    def of(self, live: int, *, forces: bool = False) -> int:
        """Drafted tokens of a round with ``live`` requests, at least one; ``forces`` as Round says."""
        if not (self._drafts or forces):
            return 0
        return next(window for least, window in self._table if live >= least)
