"""The input of a batch: a file with one request per line, in OpenAI's batch format."""

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from tandemrt.engines.validation.errors import BadRequest, clipped, quoted
from tandemrt.engines.validation.records import Section, explain
from tandemrt.runtime.servers.openai.protocols import ENDPOINTS
from tandemrt.runtime.servers.openai.request_body import parse_json

MAX_LINE = 4 << 20  # bytes, the default of --max-body


class BatchLine(Section):
    """One request: ``body`` for the endpoint ``url``. ``custom_id`` names its answer."""

    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class BadFile(BadRequest):
    """A file that is no batch.

    Attributes:
        problem: why, without the name of the file.
        line: number of the line that is wrong, if it is one.
    """

    def __init__(self, message: str, problem: str, line: int | None = None) -> None:
        super().__init__(message)
        self.problem = problem
        self.line = line


@dataclass(frozen=True)
class CheckedFile:
    """A file whose lines are all requests.

    Attributes:
        count: its number of requests.
        sha256: of its bytes.
    """

    path: Path
    count: int
    sha256: str

    def lines(self) -> Iterator[BatchLine]:
        """Read the requests one by one. Raises BadRequest if the file has changed into one with other lines."""
        return (line for line, _, _ in _read(self.path))


def check_file(path: Path, models: Collection[str], url: str | None = None, most: int | None = None) -> CheckedFile:
    """Read the whole file once. Only ``custom_id`` of each line stays in memory.

    Raises BadFile, with the number of the line: it is no request, an earlier line has its ``custom_id``, it asks for a
    model that is not among ``models``, it is for another endpoint than ``url``, or it is one line more than ``most``.
    """
    first_lines: dict[str, int] = {}  # by custom_id
    digest = hashlib.sha256()
    for line, number, data in _read(path):
        digest.update(data)
        first = first_lines.setdefault(line.custom_id, number)
        if first != number:
            raise _rejected(
                path, number, f"custom_id: must be unique, received {quoted(line.custom_id)}, as in line {first}"
            )
        _require_model(path, number, line, models)
        if url not in (None, line.url):
            raise _rejected(path, number, f"url: must be that of the batch, {url}, received {quoted(line.url)}")
        if most is not None and len(first_lines) > most:
            raise _rejected(path, number, f"a batch must have at most {most} requests, received more; split it")
    if not first_lines:
        problem = "must hold at least one request"
        raise BadFile(f"FILE: {problem}, received {clipped(path)}, which has none; add lines", problem)
    return CheckedFile(path, len(first_lines), digest.hexdigest())


def _read(path: Path) -> Iterator[tuple[BatchLine, int, bytes]]:
    """Yield each request with the number and the bytes of its line."""
    try:
        with path.open("rb") as file:
            number = 0
            while data := file.readline(MAX_LINE + 1):
                number += 1
                if len(data) > MAX_LINE:
                    raise _rejected(path, number, f"a line must have at most {MAX_LINE} bytes, received more")
                if data.strip():
                    yield _parse(path, number, data), number, data
    except OSError as error:
        raise BadRequest(
            f"FILE: must be a readable file, received {clipped(path)}: {clipped(error.strerror)}"
        ) from error


def _parse(path: Path, number: int, data: bytes) -> BatchLine:
    try:
        line = BatchLine.model_validate(parse_json(data.rstrip(b"\r\n"), "a line"))
    except ValidationError as error:
        raise _rejected(path, number, explain(error)) from None
    except BadRequest as error:
        raise _rejected(path, number, str(error)) from None
    if line.url not in ENDPOINTS:
        raise _rejected(path, number, f"url: must be one of {', '.join(ENDPOINTS)}, received {quoted(line.url)}")
    return line


def _require_model(path: Path, number: int, line: BatchLine, models: Collection[str]) -> None:
    model = line.body.get("model")
    if isinstance(model, str) and model not in models:
        raise _rejected(
            path,
            number,
            f"body.model: must be one of {', '.join(models)}, received {quoted(model)}; correct it, or "
            "serve the model under this name",
        )


def _rejected(path: Path, number: int, problem: str) -> BadFile:
    return BadFile(f"{clipped(path)} line {number}: {problem}", problem, number)
