"""Clients, and the order in which they are served: equal shares for all, however many names a sender gives itself."""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple


class Client(NamedTuple):
    """The sender of work. Names get equal shares, and the users of a name get equal shares of it.

    Attributes:
        name: what the sender cannot choose: an API key or an address. "": the server knows neither.
        user: what the sender calls itself. A sender that uses many names gets no more than the share of ``name``.
    """

    name: str = ""
    user: str = ""

    @property
    def levels(self) -> "tuple[Level, Level]":
        """The keys under which shares are counted, the outer one first."""
        return (self.name,), (self.name, self.user)

    @property
    def sender(self) -> "Level":
        """The key under which limits are counted: the name, or the user if there is no name."""
        return self.levels[0 if self.name else 1]


UNNAMED = Client()
Level = tuple[str, ...]


class ServiceOrder:
    """Remembers when clients were served. Not thread-safe.

    The order is max-min fair: the name with the least in service is next, and of its users the one with the least.
    Among equals, the one that was served longest ago is next. A new one comes before the one that was served last and
    after all others, so that a stream of new names delays no client for long.
    """

    def __init__(self) -> None:
        self._last_served: dict[Level, float] = {}  # serial number; x.5: never served
        self._served = 0

    def turns(self, waiting: Iterable[Client], in_service: Collection[Client]) -> "Turns":
        """Return the turns of the clients that wait. Forgets clients that neither wait nor are in service."""
        levels = {level for client in (*waiting, *in_service) for level in client.levels}
        self._last_served = {level: self._last_served.get(level, self._served - 0.5) for level in levels}
        busy = Counter(level for client in in_service for level in client.levels)
        return Turns(busy, dict(self._last_served), self._served)

    def mark_served(self, client: Client) -> None:
        """Note that work of ``client`` was taken."""
        self._served += 1
        for level in client.levels:
            self._last_served[level] = self._served


class Turns:
    """The order of service from now on, as if each served client stayed in service.

    ``in_service`` counts the work of each level.
    """

    def __init__(self, in_service: Counter[Level], last_served: dict[Level, float], served: int) -> None:
        self.in_service = in_service
        self._last_served = last_served
        self._served = served

    def key(self, client: Client) -> tuple[float, ...]:
        """Return a key whose smallest value is next; the caller takes the oldest work among equal ones."""
        return tuple(number for level in client.levels for number in (self.in_service[level], self._last_served[level]))

    def serve(self, client: Client) -> None:
        """Go on as if work of ``client`` was taken."""
        self._served += 1
        for level in client.levels:
            self.in_service[level] += 1
            self._last_served[level] = self._served
