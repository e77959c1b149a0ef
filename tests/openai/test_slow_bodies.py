"""A body must come at a minimum rate after a third of its time limit. The event loop's clock is simulated."""

import asyncio
import selectors
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import Request

from tandemrt.runtime.servers.http.body import MIN_BODY_RATE, BodyBudget, read_body
from tandemrt.runtime.servers.openai.errors import BodyTimeout

LIMIT_S = 30.0
SECOND = MIN_BODY_RATE  # the bytes that keep a body alive for a second


class _SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when it waits, and then at once."""

    def __init__(self) -> None:
        super().__init__(_NoWait(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _NoWait(selectors.DefaultSelector):
    def __init__(self, loop: _SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        self._loop.now += timeout or 0.0
        return super().select(0)


def outcome(parts: Sequence[tuple[float, int]]) -> tuple[str, float]:
    """Send a body of ``parts``, each a time and a size; return "read" or the error's message, and the time."""
    budget, waiting = BodyBudget(1 << 30), list(parts)
    loop = _SimulatedLoop()

    async def receive() -> dict[str, Any]:
        at, size = waiting.pop(0)
        await asyncio.sleep(at - loop.time())
        return {"type": "http.request", "body": b" " * size, "more_body": bool(waiting)}

    async def read() -> str:
        with budget.share("client") as share:
            request = Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)
            try:
                body = await read_body(request, share, 1 << 30, LIMIT_S)
            except BodyTimeout as error:
                return str(error)
            assert len(body) == sum(size for _, size in parts)
            return "read"

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(read()), loop.time()
    assert budget.total == 0
    return result


@pytest.mark.parametrize(
    ("parts", "ends"),
    [
        ([(9.9, 1)], "read"),  # any rate at first
        ([(10.1, 1)], 10.0),
        ([(1.0, SECOND), (10.9, 1)], "read"),  # early bytes count
        ([(1.0, SECOND), (11.1, 1)], 11.0),
        ([(9.4 + part, SECOND) for part in range(20)], "read"),  # at the rate
        ([(9.4 + part, SECOND * 3 // 4) for part in range(20)], 12.25),  # slower
        ([(float(second), 9 * SECOND) for second in range(30)], "read"),
        ([(float(second), 9 * SECOND) for second in range(32)], LIMIT_S),  # fast, and longer than a body may take
    ],
)
def test_a_body_slower_than_the_minimum_rate_is_refused(parts: list[tuple[float, int]], ends: str | float) -> None:
    result, end = outcome(parts)
    if ends == "read":
        assert (result, end) == ("read", pytest.approx(parts[-1][0]))
    else:
        assert end == pytest.approx(ends)
        received = sum(size for at, size in parts if at < ends)
        assert f"after 10 at 16384 bytes per second or faster, received {received} bytes; send it faster" in result
