"""Fairness between clients: whose request is next, and whose leaves a full queue."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.running import QueuedRequest
from tandemrt.runtime.workers.clients import Client, ClientLevel, Levels, ServiceOrder


class FairQueue:
    """Picks the next request so that every client gets an equal share of the slots.

    ServiceOrder picks the client: the one with the fewest requests in slots, and among equals the one that was served
    longest ago. Among one client's requests the oldest is next. With a single client, or unnamed ones, the order is
    first come, first served. The outputs of one prompt are that many requests. Each waits at most until the one before
    it ends and every other client that waited then has been served once.

    This holds among requests of equal priority. Requests with a lower priority number come first.
    """

    def __init__(self) -> None:
        self._order = ServiceOrder()

    def order(self, waiting: Iterable[QueuedRequest], running: Iterable[Request]) -> Iterator[QueuedRequest]:
        """Yield ``waiting`` in the order in which they are served, as if each yielded request joined ``running``.

        Remembers the clients, but counts no request as served; ``mark_served`` does. The work is lazy, per request.
        """
        queues: dict[tuple[int, Client], deque[QueuedRequest]] = {}
        for each in waiting:
            queues.setdefault((each.request.params.priority, each.request.client), deque()).append(each)
        turns = self._order.turns((client for _, client in queues), [request.client for request in running])
        while queues:
            _, client = queue = min(queues, key=lambda key: (key[0], *turns.key(key[1])))
            turns.serve(client)
            yield queues[queue].popleft()
            if not queues[queue]:
                del queues[queue]

    def mark_served(self, request: Request) -> None:
        """Count ``request`` as served: it joined a slot."""
        self._order.mark_served(request.client)


def pick_displaced(
    waiting: Sequence[QueuedRequest], newcomer: Request, count: int, running: Iterable[Request]
) -> QueuedRequest | None:
    """Pick the request that a full queue gives up for ``count`` requests like ``newcomer``.

    It is the newest request of the name with the most waiting requests, or else of the newcomer's name, and there of
    the user with the most (longest queue drop, McKenney 1990). None if no other name, and no user of the newcomer's
    name, has more waiting requests than the newcomer's would have.
    """
    clients = [each.request.client for each in waiting]
    levels = Levels((*(each.client for each in running), *clients, newcomer.client))
    counts = levels.count(clients)
    name, own = levels.of(newcomer.client)
    most = max((level for level in counts if level == ClientLevel(level.name)), key=counts.__getitem__, default=name)
    if counts[most] <= counts[name] + count:
        most = name
    users = [levels.of(client)[1] for client in clients if client.name == most.name]
    top = max((counts[user] for user in users), default=0)
    if most == name and top <= counts[own] + count:
        return None
    return next(
        each
        for each in reversed(waiting)
        if each.request.client.name == most.name and counts[levels.of(each.request.client)[1]] == top
    )
