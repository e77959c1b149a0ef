"""Fixtures: a uvicorn server with the demo bundle on loopback, and its clients."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from tandemrt import LLM
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.servers.batch.routes import batch_routes
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.http.server import Server, open_models
from tests.closed_loops import sound_loops  # noqa: F401  # a fixture
from tests.openai.client import Served
from tests.outputs import consistent_outputs  # noqa: F401  # a fixture
from tests.waiting import PATIENCE_S

Serve = Callable[..., Served]


@contextmanager
def serving(bundle: Path | Mapping[str, Path], door: ServerConfig, options: RuntimeOptions) -> Iterator[Served]:
    """Serve the bundle as ``demo``, or each of several by its name, in a thread, on a free port."""
    addresses: list[str] = []
    answers = threading.Event()

    def ready(address: str) -> None:
        addresses.append(address)
        answers.set()

    with (
        open_models({"demo": bundle} if isinstance(bundle, Path) else bundle, options) as models,
        batch_routes(models, door) as routers,
    ):
        server = Server(models, door, ready, routers)
        thread = threading.Thread(target=server.run, name="server")
        thread.start()
        try:
            assert answers.wait(PATIENCE_S)
            yield Served(addresses[0], next(iter(models.llms.values())), server, models.llms)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def served(demo_bundle: Path) -> Iterator[Served]:
    with serving(demo_bundle, ServerConfig(port=0, grace_s=10), RuntimeOptions(threads=1)) as running:
        yield running


@pytest.fixture(scope="session")
def llm(served: Served) -> LLM:
    """The Python API on the same open bundle: what the server must say too."""
    return served.llm


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as opened_client:
        yield opened_client
