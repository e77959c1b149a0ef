"""Clients, and the order in which they are served: equal shares, also if one sender uses many names."""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

MAX_USERS = 64  # of one name with a share of their own; a sender can call itself anything
MAX_USER_LENGTH = 512  # characters of a user, which stay in memory as long as its requests


class Client(NamedTuple):
    """The sender of work. Names get equal shares, and the users of a name get equal shares of it.

    Attributes:
        name: an identity that the sender cannot choose: an API key or an address; "" if the server has neither.
        user: a name that the sender chooses. All users of one ``name`` together get the share of ``name``.
    """

    name: str = ""
    user: str = ""


UNNAMED = Client()


class ClientLevel(NamedTuple):
    """A key under which shares are counted: a name, one of its users, or its users beyond MAX_USERS together."""

    name: str
    user: str | None = None
    further: bool = False


class Levels:
    """The levels of ``clients``, in order of arrival.

    The first MAX_USERS users of a name have a level each, and all further ones share another. So a sender that changes
    its user with each request takes at most MAX_USERS + 1 shares from the other users of its name.
    """

    def __init__(self, clients: Iterable[Client]) -> None:
        users: Counter[str] = Counter()
        self._users: dict[Client, ClientLevel] = {}
        for client in clients:
            if client not in self._users:
                further = bool(client.user) and users[client.name] >= MAX_USERS
                users[client.name] += bool(client.user)
                self._users[client] = ClientLevel(client.name, None if further else client.user, further)

    def of(self, client: Client) -> tuple[ClientLevel, ClientLevel]:
        """Return the levels of a client, the outer one first. One that is not among the clients has its own."""
        return ClientLevel(client.name), self._users.get(client, ClientLevel(client.name, client.user))

    def sender(self, client: Client) -> ClientLevel:
        """Return the level at which limits are counted: the name, or the user if there is no name."""
        return self.of(client)[0 if client.name else 1]

    def count(self, clients: Iterable[Client]) -> "Counter[ClientLevel]":
        """Count ``clients``, which are among those of this object, at both of their levels."""
        return Counter(level for client in clients for level in self.of(client))


class ServiceOrder:
    """Remembers when clients were served. Not thread-safe.

    The order is max-min fair: the name with the least in service is next, and of its users the one with the least.
    Among equals, the one that was served longest ago is next. A new one comes before the one that was served last and
    after all others, so that a stream of new names delays no client for long.
    """

    def __init__(self) -> None:
        self._last_served: dict[ClientLevel, float] = {}  # serial number; x.5: never served
        self._served = 0
        self._levels = Levels(())

    def turns(self, waiting: Iterable[Client], in_service: Collection[Client]) -> "Turns":
        """Return the turns of the clients that wait. Forgets clients that neither wait nor are in service.

        Both are in order of arrival.
        """
        clients = [*in_service, *waiting]
        self._levels = levels = Levels(clients)
        known = {level for client in clients for level in levels.of(client)}
        self._last_served = {level: self._last_served.get(level, self._served - 0.5) for level in known}
        return Turns(levels, levels.count(in_service), dict(self._last_served), self._served)

    def mark_served(self, client: Client) -> None:
        """Note that work of ``client`` was taken."""
        self._served += 1
        for level in self._levels.of(client):
            self._last_served[level] = self._served


class Turns:
    """The order of service from now on, as if each served client stayed in service."""

    def __init__(
        self, levels: Levels, in_service: Counter[ClientLevel], last_served: dict[ClientLevel, float], served: int
    ) -> None:
        self._levels = levels
        self._in_service = in_service
        self._last_served = last_served
        self._served = served

    def in_service(self, client: Client) -> int:
        """Return how much work of the client's sender is in service."""
        return self._in_service[self._levels.sender(client)]

    def key(self, client: Client) -> tuple[float, ...]:
        """Return a key whose smallest value is next; the caller takes the oldest work among equal ones."""
        levels = self._levels.of(client)
        return tuple(number for level in levels for number in (self._in_service[level], self._last_served[level]))

    def serve(self, client: Client) -> None:
        """Go on as if work of ``client`` was taken."""
        self._served += 1
        for level in self._levels.of(client):
            self._in_service[level] += 1
            self._last_served[level] = self._served
