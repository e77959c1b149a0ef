"""Fixtures: one Triton server with the demo bundle as three models, on free ports."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandemrt import LLM
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.export.triton.repository import write_model
from tests.serve.client import Client
from tools.serve import TritonServer


@pytest.fixture(scope="session")
def repository(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo as three models: one for most tests, one with a short queue, one with two instances for reloads."""
    folder = tmp_path_factory.mktemp("repository")
    bundle = Bundle.open(demo_bundle)
    write_model(bundle, folder, name="demo", threads=1, queue_limit=64)
    write_model(bundle, folder, name="short", threads=1, queue_limit=2, copy=True)
    write_model(bundle, folder, name="passing", threads=1, overlap=True, num_draft_tokens=2, instances=2)
    return folder


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[TritonServer]:
    with TritonServer(repository, explicit=True, models=("demo", "short")) as running:
        yield running


@pytest.fixture(scope="session")
def demo(server: TritonServer) -> Client:
    return Client(server, "demo")


@pytest.fixture(scope="session")
def llm(demo_bundle: Path) -> Iterator[LLM]:
    """The Python API on the same bundle, for expected outputs."""
    with LLM(demo_bundle, threads=1) as opened:
        yield opened


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and server is not None:
        report.sections.append(("the end of the server's log", server.tail()))
    return report
