"""OpenTelemetry traces: a span for every request that generates, with its queue, prefill and decode as children.

The times are those that the engine loop records, so a trace costs the loop nothing.
"""

import os
import time
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

from tandemrt import __version__
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.servers.http.generated import Generated, generated_of
from tandemrt.runtime.servers.http.response_status import ResponseStatus
from tandemrt.runtime.servers.openai.protocols import ENDPOINTS


class RequestSpans:
    """Wraps an application: exports the spans of every request to an endpoint that generates.

    A client's ``traceparent`` is the parent of its request's span.

    Args:
        endpoint: URL that receives spans (OTLP over HTTP); None: that of OpenTelemetry's environment variables.
    """

    def __init__(self, app: ASGIApp, endpoint: str | None) -> None:
        self._app = app
        name = os.environ.get("OTEL_SERVICE_NAME", "tandemrt")
        resource = Resource.create({SERVICE_NAME: name, SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("tandemrt", __version__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in ENDPOINTS:
            await self._app(scope, receive, send)
            return
        response, start = ResponseStatus(send), time.monotonic()
        try:
            await self._app(scope, receive, response)
        finally:
            _export(self._tracer, scope, response.status, start)

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()


def _export(tracer: Tracer, scope: Scope, status: int, start: float) -> None:
    """Create the spans of a request that has ended. Times are of ``time.monotonic``."""
    end, to_epoch = time.monotonic(), time.time() - time.monotonic()

    def nanoseconds(moment: float) -> int:
        return int((moment + to_epoch) * 1e9)

    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    generated = generated_of(scope)
    span = tracer.start_span(
        f"{scope['method']} {scope['path']}",
        TraceContextTextMapPropagator().extract(headers),
        SpanKind.SERVER,
        _attributes(generated) | {"http.request.method": scope["method"], "http.response.status_code": status},
        start_time=nanoseconds(start),
    )
    if status >= 500:
        span.set_status(StatusCode.ERROR)
    inside = trace.set_span_in_context(span)
    for request in generated.outputs() if generated is not None else ():
        for name, begin, until in _phases(request, end):
            attributes = {"tandemrt.output.index": request.index}
            child = tracer.start_span(name, inside, attributes=attributes, start_time=nanoseconds(begin))
            child.end(nanoseconds(until))
    span.end(nanoseconds(end))


def _phases(request: Request, end: float) -> list[tuple[str, float, float]]:
    """Return name, start and end of each phase that the request reached. ``end`` is that of a request still running."""
    ended = request.ended or end
    starts = {"queue": request.submitted, "prefill": request.joined, "decode": request.first_token_time}
    reached = [(name, start) for name, start in starts.items() if start is not None]
    ends = [*(start for _, start in reached[1:]), ended]
    return [(name, start, until) for (name, start), until in zip(reached, ends, strict=True)]


def _attributes(generated: Generated | None) -> dict[str, Any]:
    """Return attributes by OpenTelemetry's conventions for generation, and the figures of speculation."""
    if generated is None:
        return {}
    outputs = [request.output for request in generated.outputs() if request.output is not None]
    return {
        "gen_ai.request.model": generated.model,
        "gen_ai.usage.input_tokens": sum(len(request.prompt) for request in generated.requests),
        "gen_ai.usage.output_tokens": sum(len(output.token_ids) for output in outputs),
        "gen_ai.response.finish_reasons": [output.finish_reason for output in outputs],
        "tandemrt.rounds": sum(output.speculation.num_spec_steps for output in outputs),
        "tandemrt.accepted_draft_tokens": sum(output.speculation.num_accepted_draft_tokens for output in outputs),
    }
