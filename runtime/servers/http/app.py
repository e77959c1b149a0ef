"""FastAPI application with the endpoints of OpenAI and Anthropic over open bundles."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response, params
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from tandemrt import __version__
from tandemrt.engines.validation.errors import TandemError, clipped
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.servers.anthropic.request import count_tokens
from tandemrt.runtime.servers.http.async_stream import AsyncAnswer, EventNotifier
from tandemrt.runtime.servers.http.body import BodyBudget, read_body
from tandemrt.runtime.servers.http.cache_salts import client_salt, salted
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.http.connections import client_network
from tandemrt.runtime.servers.http.dashboard import LiveTraces, dashboard
from tandemrt.runtime.servers.http.docs_pages import show_file, show_start
from tandemrt.runtime.servers.http.generated import Generated
from tandemrt.runtime.servers.http.metrics import metrics_registry
from tandemrt.runtime.servers.http.pages import pages
from tandemrt.runtime.servers.http.rendering import WRITER_THREADS, AnswerWriter, render, values_of_text
from tandemrt.runtime.servers.http.streaming import EventStream, WholeAnswer
from tandemrt.runtime.servers.openai.errors import (
    ClientDisconnected,
    InvalidApiKey,
    UnsupportedEndpoint,
    error_object,
    error_response,
    json_response,
)
from tandemrt.runtime.servers.openai.protocols import ENDPOINTS, Endpoint, endpoint_of
from tandemrt.runtime.servers.openai.request_body import CompletionRequest, parse_json
from tandemrt.runtime.servers.openai.served_models import Models
from tandemrt.runtime.servers.openai.tokenization import detokenize, tokenize
from tandemrt.runtime.servers.openai.tool_call_probe import detect_format
from tandemrt.runtime.workers.clients import Client
from tandemrt.runtime.workers.fair import FairExecutor

log = logging.getLogger(__name__)

T = TypeVar("T")
PARSER_THREADS = 16  # parse and queue requests; one client occupies all but one at most
_SMALL_BODY = 16 << 10  # bytes; a body up to this size is parsed on the event loop


def create_app(models: Models, config: ServerConfig, routers: Sequence[APIRouter] = ()) -> FastAPI:
    """Return the application that serves ``models``, and ``routers`` to clients with the key.

    Its limits of connections are not those of ``config``.
    """
    for llm in models.llms.values():
        detect_format(llm.tokenizer.chat_templates)  # cached, so that no request waits for it
    require_key = _key_check(config.api_key)
    key = Depends(require_key)
    app = FastAPI(title="TandemRT", lifespan=partial(_lifespan, config), openapi_url=None, redirect_slashes=False)

    async def generate(request: Request) -> Response:
        await require_key(request)
        return await _generate(request, models, endpoint_of(request.url.path), config)

    for path in ENDPOINTS:
        app.add_route(path, generate, methods=["POST"])  # without the work that FastAPI does for typed arguments
    app.state.traces = LiveTraces() if config.dashboard_texts else None
    app.include_router(dashboard(app.state.traces, models.find, key))
    for path, page in pages().items():
        app.add_route(path, page)
    app.add_route("/docs", show_start)
    app.add_route("/docs/{path:path}", show_file)
    app.include_router(_conversions(models, config), dependencies=[key])
    for router in (_model_cards(models), *routers):
        app.include_router(router, dependencies=[key])
    app.include_router(_status(models, [] if config.metrics_without_key else [key]))
    app.add_api_route("/version", _version, dependencies=[key])
    app.add_exception_handler(TandemError, _error_response)
    app.add_exception_handler(HTTPException, _http_error_response)
    app.add_exception_handler(Exception, _error_response)
    return app


@asynccontextmanager
async def _lifespan(config: ServerConfig, app: FastAPI) -> AsyncIterator[None]:
    app.state.notifier = EventNotifier()
    app.state.threads = FairExecutor(PARSER_THREADS, "tandemrt-reader")
    app.state.writers = FairExecutor(WRITER_THREADS, "tandemrt-writer")
    app.state.bodies = BodyBudget(config.bodies_limit)
    yield
    app.state.threads.shutdown(wait=False)
    app.state.writers.shutdown(wait=False)


def _key_check(api_key: str | None) -> Callable[[Request], Coroutine[Any, Any, None]]:
    """Return a check of the key in a request's headers, which raises InvalidApiKey."""

    async def require_key(request: Request) -> None:
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        if api_key is None or (scheme.lower() == "bearer" and _same_key(credentials.strip(" \t"), api_key)):
            return
        if _same_key(request.headers.get("x-api-key", ""), api_key):  # of Anthropic's clients
            return
        raise InvalidApiKey("Authorization: must be Bearer and the server's key; set api_key in the client")

    return require_key


def _conversions(models: Models, config: ServerConfig) -> APIRouter:
    """Return the endpoints that convert texts and tokens, and one that names what the server does not do."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokens(request: Request) -> Response:
        return await _convert(request, models, tokenize, config)

    @router.post("/detokenize")
    async def text(request: Request) -> Response:
        return await _convert(request, models, detokenize, config)

    @router.post("/v1/messages/count_tokens")
    async def count(request: Request) -> Response:
        return await _convert(request, models, count_tokens, config)

    @router.post("/v1/embeddings")
    async def embed() -> Response:
        raise UnsupportedEndpoint(
            "/v1/embeddings is not supported: this server generates text and computes no embeddings; send embeddings "
            "to another server"
        )

    return router


def _model_cards(models: Models) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def cards() -> dict[str, Any]:
        return {"object": "list", "data": [models.card(name) for name in models.llms]}

    @router.get("/v1/models/{name:path}")
    async def card(name: str) -> dict[str, Any]:
        return models.card(models.find(name)[0])

    return router


def _status(models: Models, of_metrics: Sequence[params.Depends]) -> APIRouter:
    """Return /health, which needs no key, and /metrics with the dependencies ``of_metrics``."""
    router, registry = APIRouter(), metrics_registry(models.llms)

    @router.get("/health")
    async def health() -> Response:
        closed = [name for name, llm in models.llms.items() if llm.closed]
        problems = {name: llm.problem for name, llm in models.llms.items() if llm.problem is not None}
        status: dict[str, Any] = {"status": "closed" if closed else "stuck" if problems else "ok", "closed": closed}
        status |= {"problems": problems} if problems else {}
        return JSONResponse(status, status_code=503 if closed or problems else 200)

    @router.get("/metrics", dependencies=of_metrics)
    async def metrics() -> Response:
        return Response(await run_in_threadpool(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)

    return router


async def _version() -> dict[str, str]:
    return {"version": __version__}


async def _generate(request: Request, models: Models, endpoint: Endpoint, config: ServerConfig) -> Response:
    state = request.app.state
    with ExitStack() as resources:
        share = resources.enter_context(state.bodies.share(_network(request)))
        body = await read_body(request, share, config.max_body, config.body_timeout_s)
        with closing(_ClientWatch(request)) as watch:
            await watch.require_connected()  # do not parse for a client that has disconnected
            parsed, name, llm, spare = await _parse_request(request, body, models, endpoint)
            parsed = replace(parsed, params=salted(parsed.params, config.salt_cache_by, request, _network(request)))
            traces: LiveTraces | None = state.traces
            if traces is not None:
                parsed = replace(parsed, traced=traces.wanted(name))
            stream = AsyncAnswer(llm, parsed, state.notifier, state.threads, config.max_answer)
            try:
                await watch.require_connected()
                await stream.start()
                Generated(name, stream.requests).attach(request.scope)
                if traces is not None:
                    traces.follow(name, stream.requests[0])
                repeated = values_of_text(share.size) if parsed.repeated or parsed.echo else 0
                new_formatter = partial(endpoint.formatter, parsed, name, llm.tokenizer)
                formatter = await render(state.writers, parsed.client, repeated, new_formatter)
                writer = AnswerWriter(state.writers, parsed.client, endpoint, formatter, repeated)
                parsed = parsed.without_prompts()
                del new_formatter
                share.keep(share.size - spare)
                if parsed.stream:
                    # The HTTP status waits for the first delta: an earlier failure is an error response, not a stream.
                    first = await watch.while_connected(stream.next())
                    return EventStream(stream, first, writer, share, resources.pop_all())
                answer = await writer.answer(await watch.while_connected(stream.outputs()))
                share.take_answer(len(answer))
                return WholeAnswer(answer, resources.pop_all())
            except BaseException:
                stream.cancel()
                raise


async def _convert(
    request: Request,
    models: Models,
    convert: Callable[[Mapping[str, Any], LLM, Client, str | None], dict[str, Any]],
    config: ServerConfig,
) -> Response:
    """Answer a request that needs a model's tokenizer only, outside the event loop."""
    state, client = request.app.state, Client(_network(request))
    salt = client_salt(config.salt_cache_by, request, client.name)
    with state.bodies.share(client.name) as share:
        body = await read_body(request, share, config.max_body, config.body_timeout_s)
        with closing(_ClientWatch(request)) as watch:
            await watch.require_connected()

        def converted() -> Response:
            fields = parse_json(body)
            return json_response(convert(fields, models.requested(fields)[1], client, salt))

        response: Response = await asyncio.wrap_future(state.threads.submit(client, converted))
        return response


async def _parse_request(
    request: Request, body: bytes, models: Models, endpoint: Endpoint
) -> tuple[CompletionRequest, str, LLM, int]:
    """Return the request, the name and the model that it asks for, and the bytes of its body that only prompts need."""
    network = _network(request)

    def parsed_request() -> tuple[CompletionRequest, str, LLM, int]:
        parsed, name, llm = models.parse(parse_json(body), endpoint, network)
        return parsed, name, llm, parsed.prompt_bytes

    if len(body) > _SMALL_BODY:
        return await asyncio.wrap_future(request.app.state.threads.submit(Client(network), parsed_request))
    return parsed_request()


def _network(request: Request) -> str:
    """The network of the client's address (client_network). Shares and budgets are counted by it."""
    return client_network(request.client.host if request.client else "")


class _ClientWatch:
    """Watches the connection of a client whose whole body has come, in a task, until ``close``.

    Request.is_disconnected would cost a tenth of a millisecond per call.
    """

    def __init__(self, request: Request) -> None:
        self._end = asyncio.create_task(_disconnect(request))

    def close(self) -> None:
        self._end.cancel()

    async def require_connected(self) -> None:
        """Raise ClientDisconnected if the client has closed the connection."""
        await asyncio.sleep(0)  # the task sees what has come
        if self._end.done():
            raise _disconnected()

    async def while_connected(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``waiting``. Raises ClientDisconnected if the client closes the connection first."""
        task = asyncio.create_task(waiting)
        try:
            await asyncio.wait((task, self._end), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _disconnected()
            return task.result()
        finally:
            task.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _disconnected() -> ClientDisconnected:
    return ClientDisconnected("the client closed the connection")


def _same_key(received: str, key: str) -> bool:
    return secrets.compare_digest(received.encode("latin-1"), key.encode())  # latin-1 restores the header's bytes


async def _error_response(request: Request, error: Exception) -> Response:
    if not isinstance(error, TandemError):
        log.error("a request failed", exc_info=error)
    return error_response(error, body=endpoint_of(request.url.path).error)


async def _http_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{clipped(request.method)} {clipped(request.url.path)}: {error.detail}"
    return json_response(error_object(message, "invalid_request_error", None), error.status_code, error.headers)
