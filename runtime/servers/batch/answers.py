"""Answer the requests of a batch with the engine loops of this process, as the server answers them."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import BadRequest, QueueFull, TandemError
from tandemrt.runtime.servers.batch.lines import BatchLine
from tandemrt.runtime.servers.http.async_stream import AsyncAnswer, EventNotifier
from tandemrt.runtime.servers.http.rendering import WRITER_THREADS, AnswerWriter, values_of_text
from tandemrt.runtime.servers.openai.errors import status_of
from tandemrt.runtime.servers.openai.protocols import ENDPOINTS
from tandemrt.runtime.servers.openai.served_models import Models
from tandemrt.runtime.workers.fair import FairExecutor

log = logging.getLogger(__name__)

Prepare = Callable[[SamplingParams], SamplingParams]

READER_THREADS = 4  # parse and queue prompts
_RETRY_S = 0.05


@dataclass(frozen=True)
class BatchAnswer:
    """HTTP status and JSON body that the server would answer a request with."""

    line: BatchLine
    status: int
    body: bytes


class BatchEngine:
    """Answers requests for ``models``. Used in one event loop.

    Args:
        notifier, readers, writers: as the server's.
        max_answer: bytes of an answer besides its texts (AnswerSize).
        prepare: changes the parameters of each request.
    """

    def __init__(
        self,
        models: Models,
        notifier: EventNotifier,
        readers: FairExecutor,
        writers: FairExecutor,
        max_answer: int,
        prepare: Prepare,
    ) -> None:
        self._models = models
        self._notifier = notifier
        self._readers = readers
        self._writers = writers
        self._max_answer = max_answer
        self._prepare = prepare
        self._queueing = asyncio.Lock()  # of the one request that waits for room in a full queue

    async def answer(self, line: BatchLine) -> BatchAnswer:
        """Return the answer to ``line``; a request that fails alone is an answer too.

        Raises the error of a request that failed because its model accepts no more: no later one can be answered.
        """
        try:
            return BatchAnswer(line, 200, await self._generate_when_queued(line))
        except Exception as error:
            if any(llm.closed for llm in self._models.llms.values()):
                raise
            if not isinstance(error, TandemError):
                log.error("a request failed", exc_info=error)
            body = ENDPOINTS[line.url].error(error)
            return BatchAnswer(line, status_of(error).status, json.dumps(body).encode())

    async def _generate_when_queued(self, line: BatchLine) -> bytes:
        try:
            return await self._generate(line)
        except QueueFull:
            async with self._queueing:  # one waits for room at a time, so that the others finish
                while True:
                    await asyncio.sleep(_RETRY_S)
                    try:
                        return await self._generate(line)
                    except QueueFull:
                        continue

    async def _generate(self, line: BatchLine) -> bytes:
        endpoint = ENDPOINTS[line.url]
        parsed, name, llm = self._models.parse(line.body, endpoint, network="")
        if parsed.stream:
            raise BadRequest("stream: must be false in a batch, received True; leave it out")
        parsed = replace(parsed, params=self._prepare(parsed.params))
        stream = AsyncAnswer(llm, parsed, self._notifier, self._readers, self._max_answer)
        try:
            await stream.start()
            formatter = endpoint.formatter(parsed, name, llm.tokenizer)
            repeated = values_of_text(parsed.prompt_bytes) if parsed.repeated or parsed.echo else 0
            writer = AnswerWriter(self._writers, parsed.client, endpoint, formatter, repeated)
            return await writer.answer(await stream.outputs())
        finally:
            stream.cancel()


@asynccontextmanager
async def batch_engine(
    models: Models, max_answer: int, prepare: Prepare = lambda params: params
) -> AsyncIterator[BatchEngine]:
    """Yield a BatchEngine with threads of its own."""
    readers = FairExecutor(READER_THREADS, "tandemrt-reader")
    writers = FairExecutor(WRITER_THREADS, "tandemrt-writer")
    try:
        yield BatchEngine(models, EventNotifier(), readers, writers, max_answer, prepare)
    finally:
        readers.shutdown(wait=False)
        writers.shutdown(wait=False)
