"""The Ray cluster that a command uses."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tandemrt.engines.validation.errors import BackendUnavailable, BadRequest, clipped, quoted

ONE_REPLICA = "1"
Replicas = Annotated[
    str,
    typer.Option(
        help="With --ray: number of replicas, or a range that follows the load, such as 1:8. On a CPU each takes "
        "--threads cores (default: 1).",
        metavar="NUMBER|RANGE",
    ),
]
OBJECT_STORE = 256 << 20  # bytes, of a cluster that a command starts: it holds requests and answers on their way


@contextmanager
def connected() -> Iterator[None]:
    """Connect to the Ray cluster of this machine, or start one that ends with the block."""
    import ray
    from ray import serve

    starts = False
    try:
        ray.init(address="auto", logging_level=logging.WARNING)
    except ConnectionError:
        starts = True
    if starts:
        try:
            ray.init(object_store_memory=OBJECT_STORE, include_dashboard=False, logging_level=logging.WARNING)
        except Exception as error:  # Ray raises plain ones, for example if its processes need more than 30 s
            raise BackendUnavailable(f"--ray: Ray did not start: {clipped(error)}; repeat the command") from error
    try:
        yield
    finally:
        if starts:
            serve.shutdown()
            ray.shutdown()


def resolved(folders: Mapping[str, Path]) -> dict[str, Path]:
    """The working folder of a replica is another."""
    return {name: folder.resolve() for name, folder in folders.items()}


def require_one_replica(replicas: str) -> None:
    """Raise BadRequest if a command without --ray got another number of ``replicas``."""
    if replicas != ONE_REPLICA:
        raise BadRequest(f"--replicas: needs --ray, received {quoted(replicas)} without it; add --ray")
