"""Whether a server exports OpenTelemetry traces: by its configuration, or by OpenTelemetry's environment variables."""

import logging
import os
from importlib.util import find_spec

from tandemrt.engines.validation.errors import BackendUnavailable, quoted
from tandemrt.engines.validation.extras import pip_install

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_MISSING = f"needs OpenTelemetry, which is not installed; {pip_install('otel')}"


def exports_traces(endpoint: str | None) -> bool:
    """Whether to export traces: to ``endpoint``, or to that of the environment.

    The environment may serve other programs, so what is missing for its endpoint is a warning. Raises
    BackendUnavailable if it is missing for ``endpoint``.
    """
    installed = _installed("opentelemetry.sdk") and _installed("opentelemetry.exporter.otlp.proto.http")
    if endpoint is not None:
        if not installed:
            raise BackendUnavailable(f"--otlp-traces-endpoint: {_MISSING}")
        return True
    variable = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if variable is None:
        return False
    protocol = next((value for name in _PROTOCOLS if (value := os.environ.get(name))), _HTTP)
    if installed and protocol == _HTTP:
        return True
    problem = f"must be {_HTTP}, received {quoted(protocol)}" if installed else _MISSING
    log.warning("no traces are exported to %s: %s", variable, problem)
    return False


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package around it
        return False
