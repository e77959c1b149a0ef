"""Whose request is next: every client has the same share of the slots, however many requests it sends."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.waiting import Waiting


class Turns:
    """Max-min fair turns: next is the client with the fewest requests in slots.

    Of several the one that had its last turn longest ago, of one client's requests the oldest. A newcomer stands before
    the one that had the very last turn, and behind all others, so that newcomers without end keep nobody waiting for
    ever. With a single client, or none named, that is first come, first served.

    All of that holds among requests of one priority: those of a lower number come first, whoever sent them.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}  # of the clients that are here: the number of the last turn; halves: none yet
        self._turns = 0

    def order(self, waiting: Iterable[Waiting], running: Iterable[Request]) -> Iterator[Waiting]:
        """Yield ``waiting`` as they come to their turn, if each that is yielded joins those ``running``.

        Who is here is remembered; a turn only by ``take``. Work is done per request that is asked for.
        """
        shares = Counter(request.client for request in running)
        queues: dict[tuple[int, str], deque[Waiting]] = {}
        for each in waiting:
            queues.setdefault((each.request.params.priority, each.request.client), deque()).append(each)
        here = {client for _, client in queues}
        self._last = {client: turn for client, turn in self._last.items() if client in here or client in shares}
        for client in here:
            self._last.setdefault(client, self._turns - 0.5)
        last, turns = dict(self._last), self._turns
        while queues:
            queue = min(queues, key=lambda at: (at[0], shares[at[1]], last[at[1]]))
            _, client = queue
            shares[client] += 1
            turns += 1
            last[client] = turns
            yield queues[queue].popleft()
            if not queues[queue]:
                del queues[queue]

    def take(self, request: Request) -> None:
        """Remember that ``request`` had its client's turn."""
        self._turns += 1
        self._last[request.client] = self._turns


def to_displace(waiting: Sequence[Waiting], newcomer: Request, count: int = 1) -> Waiting | None:
    """The request that a full queue gives up for ``count`` like ``newcomer``: the newest of the client that has the
    most waiting.

    None if nobody has more waiting than the newcomer's client would have (longest queue drop, McKenney 1990).
    """
    counts = Counter(each.request.client for each in waiting)
    if not counts:
        return None
    client, most = counts.most_common(1)[0]
    if most <= counts[newcomer.client] + count:
        return None
    return next(each for each in reversed(waiting) if each.request.client == client)
