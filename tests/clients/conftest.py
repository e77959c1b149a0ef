"""Runs a script of a client in the environment of the clients, against a server with the demo."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.openai.client import Served
from tests.openai.conftest import serving
from tests.openai.test_tools_with_schema import calling_template
from tests.waiting import PATIENCE_S

Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def calling(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose chat template writes calls."""
    template = tmp_path_factory.mktemp("calling") / "chat.jinja"
    template.write_text(calling_template())
    with serving(demo_bundle, ServerConfig(port=0), RuntimeOptions(threads=1, chat_template=str(template))) as running:
        yield running


@pytest.fixture(scope="session")
def ask(calling: Served) -> Ask:
    """Returns what a script of this folder prints as JSON. It gets the server's URL and other arguments."""

    def asked(script: str, *arguments: str) -> Any:
        file = str(Path(__file__).with_name(script))
        command = [os.environ["CLIENTS_PYTHON"], file, calling.url, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return asked
