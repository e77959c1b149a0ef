"""``tandemrt serve``: serve bundles over HTTP with the APIs of OpenAI and Anthropic."""

import atexit
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Annotated, Literal

import typer
from rich.console import Console

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.engines.options.command_options import LIMITS, SERVER, takes_options
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BackendUnavailable, BadRequest, TandemError
from tandemrt.engines.validation.extras import pip_install
from tandemrt.runtime.cli.arguments import Draft, Dtype, MaxModelLen, Trace
from tandemrt.runtime.cli.ray_cluster import ONE_REPLICA, Replicas, require_one_replica
from tandemrt.runtime.cli.serve_ray import KEY_VARIABLE, serve_with_ray


@takes_options(leave_out=("profile",))
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Bundles to serve, or recipes, checkpoint folders or names on the Hugging Face hub, which are built "
            "first; NAME=MODEL sets the model name.",
            metavar="MODEL...",
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help=f"Key that clients must send. Default: that of {KEY_VARIABLE}, else no key.")
    ] = None,
    metrics_without_key: Annotated[
        bool, typer.Option(help="Serve /metrics to clients without the key.", rich_help_panel=SERVER)
    ] = False,
    dashboard_texts: Annotated[
        bool,
        typer.Option(
            help="Show the text of one running request on /dashboard, to all who have the key.", rich_help_panel=SERVER
        ),
    ] = False,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of pages in browsers that may use the server, such as https://example.org, or * for all; "
            "once for each. Default: only the server's own pages.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(help="PEM file with a certificate chain: serve HTTPS instead of HTTP.", rich_help_panel=SERVER),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(help="PEM file with its private key, unless --ssl-certfile has it.", rich_help_panel=SERVER),
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Largest request body, in bytes.", rich_help_panel=LIMITS)] = 4
    << 20,
    max_bodies: Annotated[
        int | None,
        typer.Option(
            min=1, help="Bytes of all request bodies at a time; default: 16 times --max-body.", rich_help_panel=LIMITS
        ),
    ] = None,
    max_answer: Annotated[
        int,
        typer.Option(
            min=1,
            help="Bytes that an answer may hold besides its texts: logprobs, token ids, repeated prompts.",
            rich_help_panel=LIMITS,
        ),
    ] = 16 << 20,
    max_connections: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Open connections; default: 4096, or what the limit of open files allows.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_connections_per_address: Annotated[
        int | None,
        typer.Option(
            min=1, help="Open connections of one client address; default: a quarter of all.", rich_help_panel=LIMITS
        ),
    ] = None,
    header_timeout: Annotated[
        float,
        typer.Option(
            min=0.1, help="Seconds in which a connection must send the head of its request.", rich_help_panel=LIMITS
        ),
    ] = 30.0,
    body_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds in which the body must follow.", rich_help_panel=LIMITS)
    ] = 30.0,
    write_timeout: Annotated[
        float,
        typer.Option(
            min=0.1, help="Seconds in which a client must take each part of a response.", rich_help_panel=LIMITS
        ),
    ] = 30.0,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(
            help="Names, separated by commas, that clients may call the server by besides its addresses and localhost; "
            "*: any. Default: none on a loopback address, else any.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    trusted_proxies: Annotated[
        str | None,
        typer.Option(
            help="Addresses or networks, separated by commas, of proxies whose X-Forwarded-For names the client.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    salt_cache_by: Annotated[
        Literal["address", "key"] | None,
        typer.Option(
            help="Share cached prefixes only between requests of one address, or of one key. Default: between all.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    grace: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seconds that running requests get after a stop signal; default: no limit.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    batch_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for files and batches: serve /v1/files and /v1/batches. Default: neither is served.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    batch_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of all files in --batch-folder.", rich_help_panel=LIMITS)
    ] = 4 << 30,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Least severe messages to print; info: one line per request.", rich_help_panel=SERVER),
    ] = "info",
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="URL that receives OpenTelemetry traces, over HTTP. Default: that of OTEL_EXPORTER_OTLP_ENDPOINT.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Serve with replicas of Ray Serve, on this machine or its cluster.")
    ] = False,
    replicas: Replicas = ONE_REPLICA,
    trace: Trace = None,
    max_model_len: MaxModelLen = None,
    dtype: Dtype = None,
    draft: Draft = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Serve bundles over HTTP with the APIs of OpenAI and Anthropic."""
    if not ray:
        _import_for_gpu(models, options)
    try:
        from tandemrt.runtime.servers.batch.routes import batch_routes
        from tandemrt.runtime.servers.http.access_log import log_to_stderr
        from tandemrt.runtime.servers.http.addresses import bind
        from tandemrt.runtime.servers.http.config import MAX_CONNECTIONS, ServerConfig
        from tandemrt.runtime.servers.http.connections import allow_connections
        from tandemrt.runtime.servers.http.server import Server, bundles_by_name, open_models
        from tandemrt.runtime.servers.http.tracing import exports_traces
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"serve: needs {error.name}; {pip_install('serve')}") from error
    config = ServerConfig(
        host=host,
        port=port,
        api_key=os.environ.get(KEY_VARIABLE) if api_key is None else api_key,
        metrics_without_key=metrics_without_key,
        dashboard_texts=dashboard_texts,
        allowed_origins=allowed_origins or (),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        max_body=max_body,
        max_bodies=max_bodies,
        max_answer=max_answer,
        max_connections=MAX_CONNECTIONS if ray and max_connections is None else allow_connections(max_connections),
        max_connections_per_address=max_connections_per_address,
        header_timeout_s=header_timeout,
        body_timeout_s=body_timeout,
        write_timeout_s=write_timeout,
        otlp_traces_endpoint=otlp_traces_endpoint,
        allowed_hosts=None if allowed_hosts is None else _listed(allowed_hosts),
        trusted_proxies=_listed(trusted_proxies or ""),
        salt_cache_by=salt_cache_by,
        grace_s=grace,
        batch_folder=batch_folder,
        batch_bytes=batch_bytes,
    )
    build = BuildOptions(max_model_len, dtype, draft)
    if ray:
        if trace is not None:
            raise BadRequest("--trace: follows one engine, received it with --ray; leave one of them out")
        serve_with_ray(models, build, options, config, replicas, log_level)
        return
    require_one_replica(replicas)
    if otlp_traces_endpoint is not None:
        exports_traces(otlp_traces_endpoint)  # a missing package is an error before models are opened
    with ExitStack() as stack:
        # The port is taken first: building and opening models takes long.
        sockets = [stack.enter_context(each) for each in bind(config)]
        folders = bundles_by_name(models, build)
        if trace is not None and len(folders) > 1:
            raise BadRequest(f"--trace: follows one bundle, received it with {len(folders)}; serve each by itself")
        for folder in folders.values():
            options.require_fit(Bundle.read(folder).limits)
        stack.enter_context(_collected_later())
        atexit.register(gc.freeze)  # else the interpreter collects all objects at its exit, for seconds under load
        console = Console()

        def on_ready(address: str) -> None:
            gc.freeze()
            gc.enable()
            page = address.removesuffix("v1")
            console.print(f"serving {', '.join(folders)} at {address}; chat: {page}", soft_wrap=True, highlight=False)

        log_to_stderr(log_level)
        with (
            suppress(KeyboardInterrupt),
            open_models(folders, options, trace) as opened,
            batch_routes(opened, config) as routers,
        ):
            Server(opened, config, on_ready, routers).run(sockets)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _import_for_gpu(models: Sequence[str], options: RuntimeOptions) -> None:
    """Begin to import torch in a thread, if one of ``models`` is a bundle for a GPU.

    torch takes longest of a start. Its files and libraries are read while this thread does other work.
    cuda.core must not be imported here: while one thread imports it, it looks complete to others.
    """

    def run() -> None:
        with suppress(ImportError):  # reported when it is needed
            import_module("torch")

    for model in models:
        with suppress(TandemError, OSError, RuntimeError):  # reported later; RuntimeError: no thread could start
            if Bundle.read(model.rpartition("=")[2]).device(options.device) != "cpu":
                Thread(target=run, name="tandemrt-import").start()
                return


@contextmanager
def _collected_later() -> Iterator[None]:
    """Pause garbage collection for a start. Almost all that a start makes lives as long as the server.

    The caller freezes it when the server is ready: later collections would read all of it, which takes 0.4 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
