"""When requests are sent: by clients that wait for their answers, or at random times."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Closed:
    """A closed loop: each of ``clients`` sends a request, and the next one after the answer."""

    clients: int

    def __str__(self) -> str:
        return f"{self.clients} client{'s' if self.clients > 1 else ''}"

    async def run(self, send: Callable[[Item], Awaitable[Result]], items: Sequence[Item]) -> list[Result]:
        """Return the results in the order in which they were complete."""
        queue, results = iter(items), list[Result]()

        async def client(queue: Iterable[Item]) -> None:
            for item in queue:
                results.append(await send(item))

        await asyncio.gather(*(client(queue) for _ in range(self.clients)))
        return results


@dataclass(frozen=True)
class Open:
    """An open loop: requests are sent at ``rate`` per second, with the gaps of a Poisson process, however long answers
    take. ``seed`` draws the gaps.
    """

    rate: float
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s"

    async def run(self, send: Callable[[Item], Awaitable[Result]], items: Sequence[Item]) -> list[Result]:
        """Return the results in the order of ``items``."""
        drawn, begun = random.Random(self.seed), list[asyncio.Task[Result]]()
        at = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for item in items:
                begun.append(group.create_task(_awaited(send, item)))
                at += drawn.expovariate(self.rate)
                # The time of each request is absolute, so that a late one does not delay those after it.
                await asyncio.sleep(at - asyncio.get_running_loop().time())
        return [task.result() for task in begun]


async def _awaited(send: Callable[[Item], Awaitable[Result]], item: Item) -> Result:
    return await send(item)


Pace = Closed | Open
