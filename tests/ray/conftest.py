"""Runs ``tandemrt serve --ray``."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tandemrt.engines.user_cache import cache_folder
from tests.conftest import ROOT
from tests.openai.client import Served, events
from tests.waiting import PATIENCE_S, eventually

pytest.importorskip("ray", reason="Ray has no package for this Python")

KEY = "secret"
COMMAND = "from tests.waiting import receive_interrupts; receive_interrupts(); from tandemrt.cli import main; main()"
NOT_STARTED = "--ray: Ray did not start"


@dataclass(frozen=True)
class RayServer:
    """A running command. Ray's processes inherit ``environment``, which tells them from those of another cluster."""

    url: str
    process: subprocess.Popen[bytes]
    environment: dict[str, str] = field(repr=False)

    def ask(self, path: str, body: Any = None, key: str = KEY) -> tuple[int, Any, dict[str, str]]:
        return self._client().ask(path, body, headers={"Authorization": f"Bearer {key}"})

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """Yield the events of a stream. Leaving the iteration disconnects."""
        connection = self._client().send(path, body | {"stream": True}, headers={"Authorization": f"Bearer {KEY}"})
        response = connection.getresponse()
        try:
            assert response.status == 200
            yield from events(response)
        finally:
            response.close()
            connection.close()

    def metrics(self) -> dict[str, float]:
        return self._client().metrics(headers={"Authorization": f"Bearer {KEY}"})

    def replicas(self) -> dict[str, Any]:
        """What each replica answers to /health."""
        status, health, _ = self.ask("/health")
        assert status in (200, 503)
        return dict(health["replicas"])

    def processes(self, title: str = "") -> list[int]:
        """Return the ids of the processes of the cluster, the command's included, whose title has ``title``."""
        pids = []
        mark = f"TANDEMRT_TEST={self.environment['TANDEMRT_TEST']}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes() and title.encode() in (folder / "cmdline").read_bytes():
                    pids.append(int(folder.name))
            except OSError:  # it has ended
                continue
        return pids

    def _client(self) -> Served:
        return Served(self.url, None, None)  # type: ignore[arg-type]  # only its HTTP client is used


@contextmanager
def serving_with_ray(model: str, port: int, environment: dict[str, str], replicas: int) -> Iterator[RayServer]:
    """Run the command until it serves, and end it.

    Skips if Ray does not start twice: its limit of 30 s is too short for a busy machine.
    """
    arguments = ["serve", model, "--ray", "--replicas", str(replicas), "--port", str(port), "--api-key", KEY]
    log = Path(environment["RAY_TMPDIR"]) / f"{uuid4().hex}.log"
    with ExitStack() as stack:
        process = stack.enter_context(_running(arguments, environment, log))
        if NOT_STARTED in log.read_text():
            process = stack.enter_context(_running(arguments, environment, log))
        printed = log.read_text()
        if NOT_STARTED in printed:
            pytest.skip(printed[printed.index(NOT_STARTED) :])
        assert process.poll() is None, printed
        yield RayServer(f"http://127.0.0.1:{port}", process, environment)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()


@contextmanager
def _running(arguments: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command: yield it when it serves or has ended."""
    with log.open("wb") as output:
        command = [sys.executable, "-c", COMMAND, *arguments]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        assert eventually(lambda: b"with Ray" in log.read_bytes() or process.poll() is not None), log.read_text()
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def ray_environment() -> Iterator[dict[str, str]]:
    """Short names, because Ray puts sockets into the folder. The home folder gets Ray's token."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    own = {"RAY_TMPDIR": folder, "HOME": folder, "TANDEMRT_TEST": uuid4().hex, "RAY_USAGE_STATS_ENABLED": "0"}
    # A replica that compiled the kernels would not be ready within PATIENCE_S on a busy machine.
    own["TANDEMRT_CACHE"] = str(cache_folder().resolve())
    own["RAY_worker_niceness"] = "0"  # not Ray's 15, which other tests would starve
    own["RAY_OVERRIDE_RESOURCES"] = '{"CPU": 4}'  # replicas of an update or a batch, on any machine
    own["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'src'}"  # the tree of the tests, whichever tree is installed
    yield dict(os.environ) | own
    shutil.rmtree(folder, ignore_errors=True)
