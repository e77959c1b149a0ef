"""Read the body of an HTTP request within limits of size, time and memory, which answers count against too."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.requests import ClientDisconnect

from tandemrt.engines.validation.errors import quoted
from tandemrt.runtime.servers.openai.errors import (
    BodyTimeout,
    BodyTooLarge,
    ClientDisconnected,
    Overloaded,
    UnsupportedMediaType,
)

MIN_BODY_RATE = 16 << 10  # bytes per second, after a third of the time limit


class BodyBudget:
    """Bytes of all request bodies and unread answers that a server holds at a time. Used in the event loop only.

    Args:
        limit: in bytes. One client address gets at most half, so that it cannot lock out the others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.most_per_client = limit // 2
        self._held: Counter[str] = Counter()  # by address

    @property
    def total(self) -> int:
        return self._held.total()

    @contextmanager
    def share(self, address: str) -> Iterator["BodyShare"]:
        """Hold the body and the answer of one request; their bytes are free again when the block ends."""
        share = BodyShare(self, address)
        try:
            yield share
        finally:
            share.keep(0)

    def take(self, address: str, size: int) -> None:
        """Count ``size`` bytes more. Raises Overloaded."""
        for taken, most in ((self._held[address], self.most_per_client), (self.total, self._limit)):
            if taken + size > most:
                raise Overloaded(
                    f"the server may hold {most} bytes of request bodies and unread answers"
                    f"{' per client' if most < self._limit else ''} at a time (--max-bodies), and holds "
                    f"{taken}; read answers faster, or send it again later"
                )
        self._held[address] += size

    def give_back(self, address: str, size: int) -> None:
        """Count ``size`` bytes less."""
        self._held[address] -= size
        if not self._held[address]:
            del self._held[address]


class BodyShare:
    """The bytes that one request and its answer hold of a BodyBudget."""

    def __init__(self, budget: BodyBudget, address: str) -> None:
        self.size = 0
        self._budget = budget
        self._address = address

    def take(self, size: int) -> None:
        """Hold ``size`` bytes more. Raises Overloaded."""
        self._budget.take(self._address, size)
        self.size += size

    def take_answer(self, size: int) -> None:
        """Hold ``size`` bytes of an answer, counted as what one client may hold if it is larger. Raises Overloaded."""
        self.take(min(size, self._budget.most_per_client - self.size))

    def keep(self, size: int) -> None:
        """Hold at most ``size`` bytes from now on; 0 if it is negative."""
        free = self.size - max(0, size)
        if free > 0:
            self._budget.give_back(self._address, free)
            self.size -= free


async def read_body(request: Request, share: BodyShare, limit: int, timeout_s: float) -> bytes:
    """Return the body, JSON of at most ``limit`` bytes.

    Its type must be announced: scripts of any web page may send other types, and bodies without one, to a server.
    The body must come within ``timeout_s`` seconds, and at MIN_BODY_RATE or faster after a third of them. Raises
    UnsupportedMediaType, BodyTooLarge, before the body has arrived if its announced length is too large, BodyTimeout,
    Overloaded if ``share`` is used up, or ClientDisconnected.
    """
    media_type = request.headers.get("content-type", "")
    if media_type.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaType(
            f"Content-Type: must be application/json, received {quoted(media_type)}; add the header"
        )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit, announced)
    body = bytearray()  # no list: of two bytes each, its parts would take 20 times the memory
    start = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(timeout_s / 3) as timer:
            async for part in request.stream():
                size = len(body) + len(part)
                if size > limit:
                    raise _too_large(limit, f"{size} and more")
                share.take(len(part))
                body += part
                timer.reschedule(start + min(timeout_s, timeout_s / 3 + size / MIN_BODY_RATE))
    except TimeoutError:
        message = (
            f"the body must come within {timeout_s:g} seconds, after {timeout_s / 3:g} at {MIN_BODY_RATE} bytes per "
            f"second or faster, received {len(body)} bytes; send it faster"
        )
        raise BodyTimeout(message) from None
    except ClientDisconnect:
        raise ClientDisconnected("the client closed the connection") from None
    return bytes(body)


def _too_large(limit: int, received: str) -> BodyTooLarge:
    return BodyTooLarge(f"the body must have at most {limit} bytes (--max-body), received {received[:20]}; send less")
