"""The application: OpenAI's endpoints over open bundles."""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from tandemrt.engines.errors import TandemError, clipped, quoted
from tandemrt.runtime.fair import FairExecutor
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.serve import bodies, errors
from tandemrt.runtime.serve.ask import Ask, read_chat, read_completion, read_json
from tandemrt.runtime.serve.metrics import registry
from tandemrt.runtime.serve.reply import Mail, Reply
from tandemrt.runtime.serve.shapes import ChatShape, Shape
from tandemrt.runtime.serve.streaming import EventStream

log = logging.getLogger(__name__)

T = TypeVar("T")
READERS = 16  # threads that read and queue requests: those of one client are at most all but one
_QUICK = 16 << 10  # bytes of a body that are read in no time, on the event loop


@dataclass(frozen=True)
class Models:
    """What is served: open bundles by name, and since when (seconds since 1970)."""

    llms: Mapping[str, LLM]
    created: int

    def find(self, name: str | None) -> tuple[str, LLM]:
        """Return the model of that name; without one, the only one. Raises UnknownModel."""
        if name is None and len(self.llms) == 1:
            return next(iter(self.llms.items()))
        if name is None or name not in self.llms:
            raise errors.UnknownModel(f"model: must be one of {', '.join(self.llms)}, received {quoted(name)}")
        return name, self.llms[name]

    def card(self, name: str) -> dict[str, Any]:
        length = self.llms[name].bundle.limits.length
        return {"id": name, "object": "model", "created": self.created, "owned_by": "tandemrt", "max_model_len": length}


def application(models: Models, *, api_key: str | None, max_body: int) -> FastAPI:
    """Return the application that serves ``models``; ``max_body`` in bytes."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.mail = Mail()
        app.state.readers = FairExecutor(READERS, "tandemrt-reader")
        yield
        app.state.readers.shutdown(wait=False)

    async def require_key(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if api_key is None or (scheme.lower() == "bearer" and _same(given.strip(), api_key)):
            return
        raise errors.BadKey("Authorization: must be Bearer and the server's key; set api_key in the client")

    app = FastAPI(title="TandemRT", lifespan=lifespan, openapi_url=None)
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(require_key)])

    @v1.post("/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(request, models, read_chat, ChatShape, max_body)

    @v1.post("/completions")
    async def complete(request: Request) -> Response:
        return await _answer(request, models, read_completion, Shape, max_body)

    @v1.get("/models")
    async def cards() -> dict[str, Any]:
        return {"object": "list", "data": [models.card(name) for name in models.llms]}

    @v1.get("/models/{name:path}")
    async def card(name: str) -> dict[str, Any]:
        return models.card(models.find(name)[0])

    @app.get("/health")
    async def health() -> Response:
        dead = [name for name, llm in models.llms.items() if llm.closed]
        return JSONResponse({"status": "closed" if dead else "ok", "closed": dead}, status_code=503 if dead else 200)

    counts = registry(models.llms)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await run_in_threadpool(generate_latest, counts), media_type=CONTENT_TYPE_LATEST)

    app.include_router(v1)
    app.add_exception_handler(TandemError, _refused)
    app.add_exception_handler(HTTPException, _no_endpoint)
    app.add_exception_handler(Exception, _refused)
    return app


async def _answer(
    request: Request,
    models: Models,
    read: Callable[[Mapping[str, Any], Mapping[str, str]], Ask],
    shape: Callable[[Ask, str, Callable[[int], str]], Shape],
    max_body: int,
) -> Response:
    body = await bodies.read(request, max_body)
    await _require_client(request)  # who has hung up meanwhile costs no more than this
    host = request.client.host if request.client else ""
    state = request.app.state

    def asked() -> tuple[Ask, str, LLM]:
        fields = read_json(body)
        model = fields.get("model")
        name, llm = models.find(model if isinstance(model, str) else None)
        return read(fields, llm.tokenizer.chat_templates), name, llm

    if len(body) > _QUICK:
        ask, name, llm = await asyncio.wrap_future(state.readers.submit(host, asked))
    else:
        ask, name, llm = asked()
    shaped = shape(ask, name, lambda token: llm.tokenizer.decode([token]))
    reply = Reply(llm, ask, state.mail, state.readers, client=ask.user or host)
    try:
        await _require_client(request)
        await reply.start()
        if ask.stream:
            # Only with the first piece is the status known: what fails before it is an error, not a stream.
            return EventStream(reply, await _unless_gone(request, reply.next()), shaped)
        return JSONResponse(shaped.whole(await _unless_gone(request, reply.whole())))
    except BaseException:
        reply.cancel()
        raise


async def _require_client(request: Request) -> None:
    if await request.is_disconnected():
        raise errors.Gone("the client closed the connection")


async def _unless_gone(request: Request, waiting: Coroutine[Any, Any, T]) -> T:
    """Wait for something. Raises Gone if the client closes the connection first."""
    tasks = asyncio.create_task(waiting), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise errors.Gone("the client closed the connection")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _same(given: str, key: str) -> bool:
    return secrets.compare_digest(given.encode("latin-1"), key.encode())  # the bytes of a header, as they came


async def _refused(_: Request, error: Exception) -> Response:
    if not isinstance(error, TandemError):
        log.error("a request failed", exc_info=error)
    return _said(errors.body(error), errors.form(error).status, errors.headers(error))


async def _no_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {clipped(request.url.path)}: {error.detail}"
    return _said(errors.said(message, "invalid_request_error", None), error.status_code, error.headers)


def _said(body: Any, status: int, headers: Mapping[str, str] | None = None) -> Response:
    # In ASCII: what is quoted may hold half a surrogate pair, which UTF-8 cannot spell.
    return Response(json.dumps(body), status, headers, media_type="application/json")
