"""Run a batch: a bounded number of requests at a time, each answer written as soon as it may be."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from tandemrt.runtime.servers.batch.answers import BatchAnswer
from tandemrt.runtime.servers.batch.lines import BatchLine


async def run_batch(
    lines: Iterable[BatchLine],
    answer: Callable[[BatchLine], Awaitable[BatchAnswer]],
    write: Callable[[BatchAnswer], None],
    *,
    in_flight: int,
    ordered: bool,
) -> None:
    """Answer ``lines``, at most ``in_flight`` at a time. ``ordered``: write the answers in the order of the lines.

    An ordered batch begins no further line while ``in_flight`` lines wait for the answer to an earlier one. An error of
    ``answer`` or ``write`` ends the batch; so does cancellation. Answers that were not written are lost then.
    """
    tasks: list[asyncio.Task[BatchAnswer]] = []  # in the order of their lines

    async def write_some() -> None:
        await asyncio.wait(tasks[:1] if ordered else tasks, return_when=asyncio.FIRST_COMPLETED)
        done = [task for task in (tasks[:1] if ordered else tasks) if task.done()]
        for task in done:
            tasks.remove(task)
            write(task.result())

    async def answered(line: BatchLine) -> BatchAnswer:
        return await answer(line)

    try:
        for line in lines:
            tasks.append(asyncio.create_task(answered(line)))
            if len(tasks) == in_flight:
                await write_some()
        while tasks:
            await write_some()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
