"""The command that serves bundles over HTTP."""

from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.command_options import takes_options
from tandemrt.engines.errors import BackendUnavailable, BadRequest
from tandemrt.engines.options import RuntimeOptions
from tandemrt.runtime.cli.arguments import Trace


@takes_options(leave_out=("profile",))
def serve(
    bundles: Annotated[
        list[str], typer.Argument(help="Bundles to serve; NAME=FOLDER under another name.", metavar="BUNDLE...")
    ],
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0: everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="TANDEMRT_API_KEY", help="What clients must send as their key.")
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, help="The longest body of a request, in bytes.")] = 4 << 20,
    grace: Annotated[
        int | None, typer.Option(min=0, help="Seconds to finish what runs when asked to stop; default: until done.")
    ] = None,
    trace: Trace = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Serve bundles to OpenAI's clients."""
    try:
        from tandemrt.runtime.serve.server import Door, Server, named, opened
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"serve: needs {error.name}; pip install 'tandemrt[serve]'") from error
    folders = named(bundles)
    if trace is not None and len(folders) > 1:
        raise BadRequest(f"--trace: follows one bundle, received it with {len(folders)}; serve each by itself")
    for folder in folders.values():
        options.require_fit(Bundle.read(folder).limits)
    console = Console()

    def ready(address: str) -> None:
        console.print(f"serving {', '.join(folders)} at {address}", soft_wrap=True, highlight=False)

    with suppress(KeyboardInterrupt), opened(folders, options, trace) as models:
        Server(models, Door(host, port, api_key, max_body, grace), ready).run()
