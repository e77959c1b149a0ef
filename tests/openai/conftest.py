"""A real uvicorn on loopback with the demo, and the clients that ask it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from tandemrt import LLM
from tandemrt.engines.options import RuntimeOptions
from tandemrt.runtime.serve.server import Door, Server, opened
from tests.openai.client import Served
from tests.waiting import PATIENCE_S

Serve = Callable[..., Served]


@contextmanager
def serving(bundle: Path, door: Door, options: RuntimeOptions) -> Iterator[Served]:
    """Serve the bundle as ``demo`` in a thread, on a free port."""
    addresses: list[str] = []
    answers = threading.Event()

    def ready(address: str) -> None:
        addresses.append(address)
        answers.set()

    with opened({"demo": bundle}, options) as models:
        server = Server(models, door, ready)
        thread = threading.Thread(target=server.run, name="server")
        thread.start()
        try:
            assert answers.wait(PATIENCE_S)
            yield Served(addresses[0], models.llms["demo"])
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def served(demo_bundle: Path) -> Iterator[Served]:
    with serving(demo_bundle, Door(port=0, grace_s=10), RuntimeOptions(threads=1)) as running:
        yield running


@pytest.fixture(scope="session")
def llm(served: Served) -> LLM:
    """The Python API on the same open bundle: what the server must say too."""
    return served.llm


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as opened_client:
        yield opened_client
