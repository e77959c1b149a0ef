"""Requests to a Triton server that serves a bundle."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.clients.http import MIN_QUEUE_LIMIT, events, post, post_lines

if TYPE_CHECKING:
    from tools.serve import TritonServer

MODEL = "bundle"


class TritonResponse(NamedTuple):
    """The joined responses of one request."""

    text: str
    reasoning: str
    token_ids: list[int]
    finish_reason: str


class TritonClient:
    """Sends requests to the model MODEL of ``server``."""

    def __init__(self, server: "TritonServer") -> None:
        self.server = server

    def generate(self, fields: Mapping[str, Any], *, stream: bool) -> TritonResponse:
        """Request a text. Raises ValueError if the server answers with an error."""
        parts = events(post(self.server.http, _path(stream=stream), {**fields, "stream": stream}))
        if any("error" in part for part in parts):
            raise ValueError(str(parts)[:200])
        tokens = [token for part in parts for token in _list(part["token_ids"])]
        text, reasoning = ("".join(part[f"{name}_output"] for part in parts) for name in ("text", "reasoning"))
        return TritonResponse(text, reasoning, tokens, parts[-1]["finish_reason"])

    def hang_up(self, fields: Mapping[str, Any]) -> None:
        """Request a stream and close the connection after its first line."""
        with closing(post_lines(self.server.http, _path(stream=True), {**fields, "stream": True})) as lines:
            next(lines, None)


@contextmanager
def triton_server(bundle: Path, *, threads: int | None, queue_limit: int = MIN_QUEUE_LIMIT) -> Iterator[TritonClient]:
    """Serve ``bundle`` on free ports until the block ends. Raises RuntimeError where no server is installed."""
    from tandemrt.engines.bundle.bundle import Bundle
    from tandemrt.export.triton.repository import write_model
    from tools.serve import TritonServer

    with tempfile.TemporaryDirectory(prefix="tandemrt-repository-") as folder:
        write_model(Bundle.open(bundle), Path(folder), name=MODEL, threads=threads, queue_limit=queue_limit)
        with TritonServer(Path(folder)) as server:
            yield TritonClient(server)


def _path(*, stream: bool) -> str:
    return f"/v2/models/{MODEL}/{'generate_stream' if stream else 'generate'}"


def _list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value]  # the server writes a list of one element as a number
