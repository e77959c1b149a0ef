"""Photograph the dashboard of a server under load: ``python -m tools.pictures.dashboard engines/built/demo``.

Writes docs/pictures/dashboard-*.png: light, dark and as wide as a phone. The figures are those of this machine.
"""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tools.browser import Page
from tools.clients.openai import OpenAIServer, openai_server
from tools.demo.corpus import held_out
from tools.pictures.__main__ import FOLDER

_CLIENTS, _SECONDS = 10, 62.0
_VIEWS = {"light": (1200, False), "dark": (1200, True), "phone": (390, False)}


def photograph(bundle: Annotated[Path, typer.Argument(help="The demo's bundle.", metavar="BUNDLE")]) -> None:
    """Serve ``bundle`` to parallel clients and write a picture of the page in each view."""
    ended = threading.Event()
    with openai_server(bundle, threads=1, clients=_CLIENTS, options=["--dashboard-texts"]) as server:
        clients = [threading.Thread(target=_send, args=(server, ended.is_set, at)) for at in range(_CLIENTS)]
        for client in clients:
            client.start()
        try:
            for name, (width, dark) in _VIEWS.items():
                with Page(width, dark=dark) as page:
                    page.open(f"http://127.0.0.1:{server.port}/dashboard")
                    time.sleep(_SECONDS)
                    page.screenshot(FOLDER / f"dashboard-{name}.png")
        finally:
            ended.set()
            for client in clients:
                client.join()


def _send(server: OpenAIServer, ended: Callable[[], bool], number: int) -> None:
    examples = held_out(200)
    for seed in itertools.count(number, _CLIENTS):
        if ended():
            return
        example = examples[seed % len(examples)]
        schema = {"type": "json_schema", "json_schema": {"name": example.kind, "schema": example.schema}}
        fields = {"messages": example.prompt_messages(), "response_format": schema, "seed": seed, "temperature": 1.0}
        server.chat(fields, stream=True)
        time.sleep(0.3 * (number % 4))  # so that the load varies


if __name__ == "__main__":
    typer.run(photograph)
