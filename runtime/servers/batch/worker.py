"""Run the batches of a server one after another, in a thread with an event loop of its own."""

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tandemrt.engines.bundle.manifest import FILE_NAME
from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import TandemError
from tandemrt.runtime.servers.batch.answers import BatchAnswer, batch_engine
from tandemrt.runtime.servers.batch.batches import Batch, BatchStore, Status
from tandemrt.runtime.servers.batch.files import FileStore
from tandemrt.runtime.servers.batch.folder import ERRORS, OUTPUT, BatchFolder, BatchJob, UnusableFolder, open_folder
from tandemrt.runtime.servers.batch.lines import BadFile, CheckedFile, check_file
from tandemrt.runtime.servers.batch.run import run_batch
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.openai.served_models import Models

log = logging.getLogger(__name__)

MAX_REQUESTS = 50_000  # of a batch, as at OpenAI
LAST_IN_QUEUE = 2**31 - 1  # priority of a request that sets none: clients that wait come first
_INTERNAL = "the server could not run the batch; its log has the reason"
_UNUSABLE = "the server has other models than when the batch began, or its disk is full; repeat the batch"
_PAUSE_S = 60.0


class BatchWorker:
    """Runs batches until ``close``. A batch that was interrupted continues with the next worker."""

    def __init__(self, models: Models, config: ServerConfig, files: FileStore, batches: BatchStore) -> None:
        self._models = models
        self._config = config
        self._files = files
        self._batches = batches
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._running: tuple[str, asyncio.Task[None]] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run_thread, name="tandemrt-batches")
        self._thread.start()

    def wake(self) -> None:
        """Look for a batch to run. Thread-safe."""
        self._call(self._changed.set)

    def cancel(self, batch: Batch) -> Batch:
        """End the batch with the answers that it has. Thread-safe. Raises BadRequest if it has ended."""
        batch = self._batches.cancel(batch)

        def stop() -> None:
            if self._running is not None and self._running[0] == batch.id:
                self._running[1].cancel()
            self._changed.set()

        self._call(stop)
        return batch

    def close(self) -> None:
        """Interrupt the running batch and end the thread."""

        def stop() -> None:
            self._closing = True
            if self._main is not None:
                self._main.cancel()

        self._call(stop)
        self._thread.join()

    def _call(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the thread has ended, because a model is closed
            self._loop.call_soon_threadsafe(function)

    def _run_thread(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, suppress(asyncio.CancelledError):
            runner.run(self._run_all())

    async def _run_all(self) -> None:
        self._main = asyncio.current_task()
        while not self._closing:
            self._changed.clear()
            batch = self._batches.next()
            if batch is None:
                await self._changed.wait()
                continue
            task = asyncio.create_task(self._run(batch))
            self._running = batch.id, task
            await asyncio.wait([task])
            self._running = None
            error = None if task.cancelled() else task.exception()
            if error is None:
                continue
            log.error("%s failed", batch.id, exc_info=error)
            if any(llm.closed for llm in self._models.llms.values()):
                return
            try:
                self._end(batch, "failed", [_error(str(error) if isinstance(error, TandemError) else _INTERNAL)])
            except OSError:  # for example a full disk: the batch keeps its status and is tried again
                log.exception("%s cannot be ended", batch.id)
                await asyncio.sleep(_PAUSE_S)

    async def _run(self, batch: Batch) -> None:
        """Bring the batch to its end. Raises CancelledError if it is cancelled; its next run then ends it."""
        if batch.status in ("cancelling", "finalizing"):  # also what an earlier worker left
            self._end(batch, "cancelled" if batch.status == "cancelling" else "completed")
            return
        path = self._files.path(self._files.records.find(batch.owner, batch.input_file_id))
        try:
            requests = await asyncio.to_thread(check_file, path, self._models.llms, batch.endpoint, MAX_REQUESTS)
        except BadFile as error:
            self._end(batch, "failed", [_error(error.problem, error.line)])
            return
        self._batches.update(batch, "in_progress", total=requests.count)
        try:
            async with asyncio.timeout(batch.expires_at - time.time()):
                await self._answer(batch, requests)
        except UnusableFolder as error:
            log.error("%s: %s", batch.id, error)
            self._end(batch, "failed", [_error(_UNUSABLE)])
        except TimeoutError:
            self._end(batch, "expired")
        else:
            self._batches.update(batch, "finalizing")
            self._end(batch, "completed")

    async def _answer(self, batch: Batch, requests: CheckedFile) -> None:
        """Answer the requests that have no answer yet."""

        def prepare(params: SamplingParams) -> SamplingParams:
            changes: dict[str, Any] = {} if params.priority else {"priority": LAST_IN_QUEUE}
            if self._config.salt_cache_by is not None:
                identity = repr(("batch", batch.owner, params.cache_salt))
                changes["cache_salt"] = hashlib.sha256(identity.encode()).hexdigest()
            return params.model_copy(update=changes)

        with open_folder(self._batches.answers(batch), self._job(requests)) as folder:
            self._files.growing = folder.size

            def write(answer: BatchAnswer) -> None:
                self._files.require_room(len(answer.body))
                folder.write(answer)
                self._files.growing = folder.size
                self._batches.count(batch, len(folder.answered) - folder.errors, folder.errors)

            async with batch_engine(self._models, self._config.max_answer, prepare) as engine:
                await run_batch(
                    (line for line in requests.lines() if line.custom_id not in folder.answered),
                    engine.answer,
                    write,
                    in_flight=sum(llm.bundle.limits.batch for llm in self._models.llms.values()),
                    ordered=False,
                )

    def _end(self, batch: Batch, status: Status, errors: Sequence[dict[str, Any]] = ()) -> None:
        """Make files of the answers, and give the batch its last status. A repetition changes nothing."""
        folder, name = self._batches.answers(batch), batch.id.removeprefix("batch_")
        if folder.exists():
            BatchFolder(folder)  # drops a partial line
        output, failed = (
            self._files.adopt(batch.owner, f"file-{name}-{kind}", f"{batch.id}_{file}", folder / file)
            for kind, file in (("output", OUTPUT), ("errors", ERRORS))
        )
        self._files.growing = 0
        self._batches.end(batch, status, errors=[*errors], output_file_id=output, error_file_id=failed)

    def _job(self, requests: CheckedFile) -> BatchJob:
        manifests = [(llm.bundle.folder / FILE_NAME).read_bytes() for llm in self._models.llms.values()]
        digest = hashlib.sha256(b"".join(manifests)).hexdigest()
        return BatchJob(requests.sha256, ", ".join(self._models.llms), digest, ordered=False)


def _error(message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": "invalid_request", "message": message, "param": None, "line": line}
