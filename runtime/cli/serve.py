"""``tandemrt serve``: serve bundles over HTTP with the APIs of OpenAI and Anthropic."""

import atexit
import gc
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from threading import Thread
from typing import Annotated

import typer
from rich.console import Console

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.engines.options.command_options import takes_options
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BackendUnavailable, BadRequest, TandemError
from tandemrt.engines.validation.extras import pip_install
from tandemrt.runtime.cli.arguments import Draft, Dtype, MaxModelLen, Trace
from tandemrt.runtime.cli.ray_cluster import ONE_REPLICA, Replicas, require_one_replica
from tandemrt.runtime.cli.serve_ray import serve_with_ray
from tandemrt.runtime.cli.server_options import takes_server_options
from tandemrt.runtime.servers.http.config import KEY_VARIABLE, ServerConfig


@takes_options(leave_out=("profile",))
@takes_server_options
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Bundles to serve, or recipes, checkpoint folders or names on the Hugging Face hub, which are built "
            "first; NAME=MODEL sets the model name.",
            metavar="MODEL...",
        ),
    ],
    server: ServerConfig,
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
        from tandemrt.runtime.llm.llm import collected_later
        from tandemrt.runtime.servers.batch.routes import batch_routes
        from tandemrt.runtime.servers.http.access_log import log_to_stderr
        from tandemrt.runtime.servers.http.addresses import bind
        from tandemrt.runtime.servers.http.connections import allow_connections
        from tandemrt.runtime.servers.http.server import Server, bundles_by_name, open_models
        from tandemrt.runtime.servers.http.tracing import exports_traces
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"serve: needs {error.name}; {pip_install('serve')}") from error
    if server.api_key is None:
        server = replace(server, api_key=os.environ.get(KEY_VARIABLE))
    build = BuildOptions(max_model_len, dtype, draft)
    if ray:
        if trace is not None:
            raise BadRequest("--trace: follows one engine, received it with --ray; leave one of them out")
        serve_with_ray(models, build, options, server, replicas)
        return
    require_one_replica(replicas)
    server = replace(server, max_connections=allow_connections(server.max_connections))
    if server.otlp_traces_endpoint is not None:
        exports_traces(server.otlp_traces_endpoint)  # a missing package is an error before models are opened
    with ExitStack() as stack:
        # The port is taken first: building and opening models takes long.
        sockets = [stack.enter_context(each) for each in bind(server)]
        folders = bundles_by_name(models, build)
        if trace is not None and len(folders) > 1:
            raise BadRequest(f"--trace: follows one bundle, received it with {len(folders)}; serve each by itself")
        for folder in folders.values():
            options.require_fit(Bundle.read(folder).limits)
        stack.callback(gc.unfreeze)
        stack.enter_context(collected_later())
        atexit.register(gc.freeze)  # else the interpreter collects all objects at its exit, for seconds under load
        console = Console()

        def on_ready(address: str) -> None:
            gc.freeze()  # later collections would read all that the start has made, which takes 0.4 s
            gc.enable()
            page = address.removesuffix("v1")
            console.print(f"serving {', '.join(folders)} at {address}; chat: {page}", soft_wrap=True, highlight=False)

        log_to_stderr(server.log_level)
        with (
            suppress(KeyboardInterrupt),
            open_models(folders, options, trace) as opened,
            batch_routes(opened, server) as routers,
        ):
            Server(opened, server, on_ready, routers).run(sockets)


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
