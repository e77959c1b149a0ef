"""OpenTelemetry traces, received by a collector that decodes what arrives over HTTP."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.runtime.servers.http import tracing
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.http.spans import _export
from tandemrt.runtime.servers.http.tracing import exports_traces
from tests.openai.client import endless, named_events
from tests.openai.conftest import serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """The URL of a collector, and the spans that it has received."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            for each in received.resource_spans:
                resource = {attribute.key: attribute.value.string_value for attribute in each.resource.attributes}
                assert resource["service.name"] == "tandemrt"
                spans.extend(span for scope in each.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        finally:
            server.shutdown()
            thread.join()


def value(span: Any, name: str) -> Any:
    [attribute_value] = [attribute.value for attribute in span.attributes if attribute.key == name]
    return getattr(attribute_value, attribute_value.WhichOneof("value"))


def test_a_request_has_spans_for_its_queue_prefill_and_decode(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with collector() as (url, spans):
        config = ServerConfig(port=0, grace_s=10, otlp_traces_endpoint=url)
        with serving(demo_bundle, config, RuntimeOptions(threads=1)) as served:
            parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            asked = endless(max_tokens=9, n=2)
            assert served.ask("/v1/completions", asked, headers=parent)[0] == 200
            messages = [{"role": "user", "content": "Two boxes."}]
            named_events(served, "/v1/messages", {"messages": messages, "max_tokens": 9, "stream": True})
            assert served.ask("/v1/completions", {"prompt": ""})[0] == 400
            assert served.ask("/v1/models")[0] == 200
    roots = {span.name: span for span in spans if span.name.startswith("POST") if value(span, STATUS) == 200}
    assert list(roots) == ["POST /v1/completions", "POST /v1/messages"]
    completion = roots["POST /v1/completions"]
    assert (completion.trace_id.hex(), completion.parent_span_id.hex()) == (TRACE, PARENT)
    assert (value(completion, "gen_ai.request.model"), value(completion, "gen_ai.usage.output_tokens")) == ("demo", 18)
    for root, outputs in ((completion, 2), (roots["POST /v1/messages"], 1)):
        children = [span for span in spans if span.parent_span_id == root.span_id]
        for index in range(outputs):
            phases = [span for span in children if value(span, "tandemrt.output.index") == index]
            assert [span.name for span in phases] == ["queue", "prefill", "decode"]
            times = [root.start_time_unix_nano, *(span.start_time_unix_nano for span in phases)]
            ends = [*(span.end_time_unix_nano for span in phases), root.end_time_unix_nano]
            assert [*times, ends[-1]] == sorted([*times, ends[-1]])
            assert [span.start_time_unix_nano for span in phases[1:]] == ends[:2]
    [rejected] = [span for span in spans if span.name.startswith("POST") and value(span, STATUS) == 400]
    assert not [span for span in spans if span.parent_span_id == rejected.span_id]
    assert len(spans) == 3 + 3 * 3


STATUS = "http.response.status_code"


def test_errors_of_the_server_are_errors_of_the_span_and_those_of_a_client_are_not() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for status in (200, 499, 500, 503):
        _export(provider.get_tracer("test"), {"method": "GET", "path": "/", "headers": []}, status, time.monotonic())
    ended = [span.status.status_code for span in exporter.get_finished_spans()]
    assert ended == [StatusCode.UNSET, StatusCode.UNSET, StatusCode.ERROR, StatusCode.ERROR]


@pytest.mark.parametrize(
    ("variables", "warning"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "received 'grpc'"),
    ],
)
def test_the_environment_turns_traces_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variables: dict[str, str], warning: str | None
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert exports_traces(None) == (warning == "")
    assert (warning or "") in caplog.text


def test_a_missing_package_is_an_error_only_for_the_option(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda _: None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://x")
    assert not exports_traces(None)
    assert "pip install '.[otel]' in a checkout, else pip install 'tandemrt[otel]'" in caplog.text
    with pytest.raises(BackendUnavailable, match=r"--otlp-traces-endpoint: needs OpenTelemetry"):
        exports_traces("http://x")
