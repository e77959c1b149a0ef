"""The gateway: takes HTTP requests from Ray's proxy and hands each to the replica that knows its beginning.

Ray chooses the replica (ConsistentHashRouter), queues requests while all are busy, and cancels a request whose client
disconnects. A request whose replica dies before anything was sent goes to another replica.
"""

import json
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandemrt.engines.validation.errors import BadRequest, ProcessLost, QueueFull, TandemError
from tandemrt.runtime.servers.http.body import BodyBudget, read_body
from tandemrt.runtime.servers.http.cancelled_answers import SentResponse
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.http.connections import client_network
from tandemrt.runtime.servers.openai.errors import error_response, json_response
from tandemrt.runtime.servers.openai.protocols import endpoint_of
from tandemrt.runtime.servers.openai.request_body import parse_json
from tandemrt.runtime.servers.ray.beginning import beginning
from tandemrt.runtime.servers.ray.replica import WholeResponse

log = logging.getLogger(__name__)

ATTEMPTS = 3  # a request that ends this many replicas gets an error
GATHER_S = 10.0  # in which every replica must answer /health and /metrics
SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")


class Gateway:
    """ASGI application over the replicas behind ``replicas``, a DeploymentHandle."""

    def __init__(self, replicas: Any, config: ServerConfig) -> None:
        self._replicas = replicas
        self._config = config
        self._bodies = BodyBudget(config.bodies_limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        plain = {name: scope[name] for name in SCOPE} | {"client": scope["client"], "server": scope["server"]}
        try:
            if scope["path"] in ("/health", "/metrics"):
                await (await self._gather(plain))(scope, receive, send)
            elif scope["method"] != "POST":
                await self._forward(plain, b"", "", send)
            else:
                with self._bodies.share(client_network(request.client.host if request.client else "")) as share:
                    body = await read_body(request, share, self._config.max_body, self._config.body_timeout_s)
                    await self._forward(plain, body, _beginning(body), send)
        except TandemError as error:
            await error_response(error, body=endpoint_of(scope["path"]).error)(scope, receive, send)

    async def _forward(self, scope: Mapping[str, Any], body: bytes, session: str, send: Send) -> None:
        """Send the response of the replica that ``session`` belongs to; of any if it is empty."""
        sent = SentResponse(send)
        handle = self._replicas.options(stream=True, session_id=session)
        for _ in range(ATTEMPTS):
            responses = handle.respond.remote(scope, body)
            try:
                async for messages in responses:
                    for message in messages:
                        await sent.send(message)
                return
            except BackPressureError as error:
                raise QueueFull("every replica and the queue before them is full; send it again later") from error
            except RayActorError as error:
                log.warning("the replica of a request has ended: %s", error)
                if sent.started:
                    await self._end(sent, scope["path"], error)
                    return
            finally:
                responses.cancel()
        raise ProcessLost(f"the replicas that ran this request ended, {ATTEMPTS} one after the other; send it again")

    async def _end(self, sent: SentResponse, path: str, error: Exception) -> None:
        """End a response that has begun: a stream with an error event, another one with its connection."""
        if sent.complete:
            return
        if not sent.events:
            raise error
        event = endpoint_of(path).failure(ProcessLost("the replica of this request has ended; send it again")).encode()
        await sent.send({"type": "http.response.body", "body": event, "more_body": False})

    async def _gather(self, scope: Mapping[str, Any]) -> Response:
        """Ask every replica for /health or /metrics, and return the response for all."""
        answers = await self._replicas.broadcast("respond_whole", scope).results_async(
            timeout_s=GATHER_S, return_exceptions=True
        )
        responses = [answer for answer in answers if isinstance(answer, WholeResponse)]
        if scope["path"] == "/health":
            return _health(responses)
        rejected = [response for response in responses if response.status != 200]
        if rejected:
            return Response(rejected[0].body, rejected[0].status, dict(_texts(rejected[0])))
        return Response(_metrics(responses), media_type=CONTENT_TYPE_LATEST)


def _beginning(body: bytes) -> str:
    try:
        return beginning(parse_json(body))
    except BadRequest:
        return ""  # a replica answers with the error


def _health(responses: list[WholeResponse]) -> Response:
    """Status 200 if a replica is well: it answers the requests."""
    well = any(response.status == 200 for response in responses)
    replicas = {response.replica: json.loads(response.body) for response in responses}
    return json_response({"status": "ok" if well else "closed", "replicas": replicas}, 200 if well else 503)


def _metrics(responses: list[WholeResponse]) -> bytes:
    """Return the metrics of all replicas; the label ``replica`` says whose."""
    metrics: dict[str, Metric] = {}
    for response in responses:
        for family in text_string_to_metric_families(response.body.decode()):
            metric = metrics.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                metric.samples.append(sample._replace(labels=sample.labels | {"replica": response.replica}))
    return generate_latest(SimpleNamespace(collect=metrics.values))  # it only collects


def _texts(response: WholeResponse) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers]
