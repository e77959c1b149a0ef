"""``/v1/files`` and ``/v1/batches``: OpenAI's Batch API, on the code of ``tandemrt batch``."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse

from tandemrt.engines.bundle.lock import locked
from tandemrt.engines.user_cache import make_private
from tandemrt.engines.validation.errors import BadRequest, clipped, quoted
from tandemrt.engines.validation.records import Section, explain
from tandemrt.runtime.servers.batch.batches import BatchStore
from tandemrt.runtime.servers.batch.files import MAX_FILES, FileStore
from tandemrt.runtime.servers.batch.upload import Uploads
from tandemrt.runtime.servers.batch.worker import BatchWorker
from tandemrt.runtime.servers.http.body import BodyBudget, read_body
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.http.connections import client_network
from tandemrt.runtime.servers.openai.errors import json_response
from tandemrt.runtime.servers.openai.protocols import ENDPOINTS
from tandemrt.runtime.servers.openai.request_body import parse_json
from tandemrt.runtime.servers.openai.served_models import Models

_MAX_BODY = 64 << 10  # bytes of a request that creates a batch


class NewBatch(Section):
    """The body of a request that creates a batch."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = Field(default=None, max_length=16)


@contextmanager
def batch_routes(models: Models, config: ServerConfig) -> Iterator[Sequence[APIRouter]]:
    """Yield the routes, and run batches meanwhile; no routes without a ``batch_folder``. Raises BadRequest."""
    folder = config.batch_folder
    if folder is None:
        yield ()
        return
    make_private(folder)
    with locked(folder) as holds:
        if holds is False or not folder.is_dir():
            problem = "another server uses it" if folder.is_dir() else "it cannot be made"
            raise BadRequest(
                f"batch_folder: must be a folder for one server, received {clipped(folder)}: {problem}; name another"
            )
        try:
            files = FileStore(folder / "files", config.batch_bytes)
            batches = BatchStore(folder / "batches")
        except OSError as error:
            raise BadRequest(
                f"batch_folder: must be a folder that can be written, received {clipped(folder)}: {error.strerror}; "
                "name another"
            ) from error
        worker = BatchWorker(models, config, files, batches)
        try:
            yield _file_routes(files, batches, config), _batch_routes(files, batches, worker, config)
        finally:
            worker.close()


def _file_routes(files: FileStore, batches: BatchStore, config: ServerConfig) -> APIRouter:
    router, uploads = APIRouter(prefix="/v1/files"), Uploads(config)

    @router.post("")
    async def upload(request: Request) -> Response:
        async with uploads.read(request) as file:
            size, name = file.size or 0, file.filename or "file"
            stored = await run_in_threadpool(files.add, owner_of(request), name, file.file, size)
            return json_response(stored.card())

    @router.get("")
    async def files_of_key(request: Request) -> Response:
        files.remove_expired()
        purpose = request.query_params.get("purpose")
        own = [file for file in files.records if file.owner == owner_of(request)]
        return _page(request, [file.card() for file in own if purpose in (None, file.purpose)], MAX_FILES, MAX_FILES)

    @router.get("/{file_id}")
    async def card(request: Request, file_id: str) -> Response:
        return json_response(files.records.find(owner_of(request), file_id).card())

    @router.get("/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        file = files.records.find(owner_of(request), file_id)
        return FileResponse(files.path(file), media_type="application/octet-stream")

    @router.delete("/{file_id}")
    async def delete(request: Request, file_id: str) -> Response:
        file = files.records.find(owner_of(request), file_id)
        for batch in batches.records:
            if batch.input_file_id == file.id and not batch.ended:
                raise BadRequest(f"the file is the input of {batch.id}, which is {batch.status}; cancel that first")
        files.remove(file)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    return router


def _batch_routes(files: FileStore, batches: BatchStore, worker: BatchWorker, config: ServerConfig) -> APIRouter:
    router, budget = APIRouter(prefix="/v1/batches"), BodyBudget(config.bodies_limit)

    @router.post("")
    async def create(request: Request) -> Response:
        with budget.share(client_network(request.client.host if request.client else "")) as share:
            body = parse_json(await read_body(request, share, _MAX_BODY, config.body_timeout_s))
        new = _parsed(body)
        file = files.records.find(owner_of(request), new.input_file_id)
        if file.purpose != "batch":
            raise BadRequest(
                f"input_file_id: must be a file of purpose 'batch', received one of {quoted(file.purpose)}"
            )
        batch = batches.add(file, new.endpoint, new.metadata)
        worker.wake()
        return json_response(batch.card())

    @router.get("")
    async def batches_of_key(request: Request) -> Response:
        own = [batch for batch in batches.records if batch.owner == owner_of(request)]
        return _page(request, [batch.card() for batch in own], 20, 100)

    @router.get("/{batch_id}")
    async def card(request: Request, batch_id: str) -> Response:
        return json_response(batches.records.find(owner_of(request), batch_id).card())

    @router.post("/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        batch = batches.records.find(owner_of(request), batch_id)
        return json_response(worker.cancel(batch).card())

    return router


def owner_of(request: Request) -> str:
    """Return a digest of the key that the client sends: it alone reaches what it creates. Without a key: of none."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    key = credentials.strip(" \t") if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    return hashlib.sha256(b"tandemrt batches " + key.encode("latin-1")).hexdigest()


def _parsed(body: dict[str, Any]) -> NewBatch:
    try:
        new = NewBatch.model_validate(body)
    except ValidationError as error:
        raise BadRequest(explain(error)) from error
    if new.endpoint not in ENDPOINTS:
        raise BadRequest(f"endpoint: must be one of {', '.join(ENDPOINTS)}, received {quoted(new.endpoint)}")
    return new


def _page(request: Request, cards: list[dict[str, Any]], default: int, most: int) -> Response:
    """Return the part of ``cards``, oldest first, that the query asks for: ``after``, ``limit`` and ``order``.

    ``default``, ``most``: values of ``limit``.
    """
    query = request.query_params
    order, after = query.get("order", "desc"), query.get("after")
    try:
        limit = int(query.get("limit", default))
    except ValueError:
        limit = 0
    if not 1 <= limit <= most:
        raise BadRequest(f"limit: must be 1 to {most}, received {quoted(query.get('limit'))}; correct it")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order: must be 'asc' or 'desc', received {quoted(order)}; correct it")
    if order == "desc":
        cards.reverse()
    ids = [card["id"] for card in cards]
    if after is not None and after not in ids:
        raise BadRequest(f"after: must be the id of an entry of the list, received {quoted(after)}; correct it")
    first = 0 if after is None else ids.index(after) + 1
    page = cards[first : first + limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(cards) > first + limit,
        }
    )
