"""Answer a file of requests with replicas on a Ray cluster."""

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from ray import serve
from ray.exceptions import RayActorError

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import ProcessLost, quoted
from tandemrt.runtime.servers.batch.answers import BatchAnswer, batch_engine
from tandemrt.runtime.servers.batch.lines import BatchLine
from tandemrt.runtime.servers.http.server import open_models
from tandemrt.runtime.servers.ray.deployment import ReplicaCount, replicated
from tandemrt.runtime.servers.ray.gateway import ATTEMPTS
from tandemrt.runtime.servers.ray.replica import require_open

log = logging.getLogger(__name__)


class BatchReplica:
    """Opens the bundles in ``folders`` and answers requests of a batch. Ray runs one in a process of its own."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, folders: Mapping[str, Path], options: RuntimeOptions, max_answer: int
    ) -> None:
        self._resources = AsyncExitStack()
        self._models = self._resources.enter_context(open_models(folders, options))
        self._engine = await self._resources.enter_async_context(batch_engine(self._models, max_answer))

    async def __del__(self) -> None:  # Ray awaits it when the replica has drained
        await self._resources.aclose()

    def check_health(self) -> None:
        require_open(self._models)

    async def answer(self, line: BatchLine) -> BatchAnswer:
        return await self._engine.answer(line)


@contextmanager
def batch_replicas(
    name: str,
    folders: Mapping[str, Path],
    options: RuntimeOptions,
    replicas: ReplicaCount,
    in_flight: int,
    max_answer: int,
) -> Iterator[Callable[[BatchLine], Awaitable[BatchAnswer]]]:
    """Start replicas, and yield a function that answers a request with one of them.

    Args:
        name: of the application in the cluster, which a later call with it replaces.
        in_flight: requests of one replica.
        max_answer: bytes of an answer besides its texts (AnswerSize).
    """
    deployment, options = replicated(BatchReplica, folders, options, replicas)
    deployment = deployment.options(max_ongoing_requests=in_flight)
    handle = serve.run(deployment.bind(dict(folders), options, max_answer), name=name, route_prefix=None)

    async def answer(line: BatchLine) -> BatchAnswer:
        for _ in range(ATTEMPTS):
            try:
                return await handle.answer.remote(line)  # type: ignore[no-any-return]
            except RayActorError as error:
                log.warning("the replica of a request has ended: %s", error)
        raise ProcessLost(
            f"{ATTEMPTS} replicas that ran {quoted(line.custom_id)} ended one after the other; repeat the command"
        )

    try:
        yield answer
    finally:
        serve.delete(name)
