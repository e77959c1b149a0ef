"""How many tokens a round drafts: one number, or a table by the requests that run."""

from collections.abc import Mapping

from tandemrt.engines.errors import BadRequest, quoted


class Windows:
    """The window of a round with ``live`` requests.

    ``rule`` is a number, or {requests: window}: each entry holds from its number of requests on, up to the next.
    None takes ``limit``, the bundle's window. Under the coupled rule the window changes no text, under the rejection
    rule no law, though a table then makes a text depend on how many others run.

    Raises BadRequest for a window outside 0..limit, or a table that says nothing about one request.
    """

    def __init__(self, rule: int | Mapping[int, int] | None, limit: int) -> None:
        table = dict(rule) if isinstance(rule, Mapping) else {1: limit if rule is None else rule}
        for window in table.values():
            if not _is_count(window) or window > limit:
                raise BadRequest(
                    f"window: the bundle was built for 0..{limit} drafted tokens per round, received {quoted(window)}"
                )
        if any(not _is_count(live) or live < 1 for live in table) or 1 not in table:
            raise BadRequest(
                "window: a table must map numbers of requests, 1 among them, to drafted tokens per round, received "
                f"{table}; for example {{1: {limit}, 33: {limit // 2}}}"
            )
        self._table = sorted(table.items(), reverse=True)
        self.largest = max(table.values())

    def of(self, live: int) -> int:
        """Drafted tokens of a round with ``live`` requests, at least one."""
        return next(window for least, window in self._table if live >= least)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
