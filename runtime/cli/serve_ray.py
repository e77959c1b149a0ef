"""``tandemrt serve --ray``, and the application of ``serve run tandemrt.serve_ray:app``."""

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rich.console import Console

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.options.text_options import OptionsFromText
from tandemrt.engines.validation.errors import BackendUnavailable, BadRequest, quoted
from tandemrt.engines.validation.extras import pip_install
from tandemrt.runtime.cli.ray_cluster import connected, resolved
from tandemrt.runtime.cli.server_options import option_name
from tandemrt.runtime.servers.http.config import KEY_VARIABLE, ServerConfig

APPLICATION = "tandemrt"
# Options of ``serve`` that would have no effect: Ray's proxy has the connections, and batches belong to one process.
UNSUPPORTED = (
    "dashboard_texts",
    "ssl_certfile",
    "ssl_keyfile",
    "max_connections",
    "max_connections_per_address",
    "header_timeout_s",
    "write_timeout_s",
    "otlp_traces_endpoint",
    "trusted_proxies",
    "batch_folder",
)


def serve_with_ray(
    models: Sequence[str],
    build: BuildOptions,
    options: RuntimeOptions,
    config: ServerConfig,
    replicas: str,
) -> None:
    """Serve ``models`` with replicas until a signal, in the Ray cluster of this machine, or in one that starts here."""
    for field in fields(config):
        if field.name in UNSUPPORTED and getattr(config, field.name) != field.default:
            option = option_name(field.name).replace("_", "-")
            raise BadRequest(
                f"--{option}: has no effect with --ray, received {quoted(getattr(config, field.name))}; leave it out"
            )
    try:
        from ray import serve

        from tandemrt.runtime.servers.http.server import bundles_by_name
        from tandemrt.runtime.servers.ray.application import application
        from tandemrt.runtime.servers.ray.deployment import ReplicaCount
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"--ray: needs {error.name}; {pip_install('ray')}") from error
    count = ReplicaCount.from_text(replicas)
    folders = bundles_by_name(models, build)
    for folder in folders.values():
        options.require_fit(Bundle.read(folder).limits)
    with connected():
        serve.start(http_options={"host": config.host, "port": config.port})
        app = application(resolved(folders), options, config, count)
        serve.run(app, name=APPLICATION, route_prefix="/")
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which sets handlers that abort
            signal.signal(number, lambda *_: stop.set())
        address = f"http://{config.host}:{config.port}/v1"
        Console().print(f"serving {', '.join(folders)} at {address} with Ray", soft_wrap=True, highlight=False)
        stop.wait()
        serve.delete(APPLICATION)


def app(args: Mapping[str, str]) -> Any:
    """Return the application for ``serve run`` and KubeRay.

    ``args``: ``model``, as for ``tandemrt serve``; ``replicas``, such as 4 or 1:8; any option of RuntimeOptions. The
    environment variable TANDEMRT_API_KEY holds the key that clients must send. Raises BadRequest.
    """
    from tandemrt.runtime.servers.http.server import bundles_by_name
    from tandemrt.runtime.servers.ray.application import application
    from tandemrt.runtime.servers.ray.deployment import ReplicaCount

    others: dict[str, Any] = dict(args)
    model, replicas = others.pop("model", None), others.pop("replicas", "1")
    if model is None:
        raise BadRequest("model: must be given; write model=NAME=FOLDER after tandemrt.serve_ray:app")
    options = RuntimeOptions(**OptionsFromText(**others).arguments())
    config = ServerConfig(host="0.0.0.0", api_key=os.environ.get(KEY_VARIABLE))  # Ray listens on the host
    folders = resolved(bundles_by_name([model]))
    return application(folders, options, config, ReplicaCount.from_text(str(replicas)))
