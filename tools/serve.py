"""Run Triton Inference Server from the ``nvidia-pytriton`` wheel on a model repository, without a container.

python -m tools.serve REPOSITORY --model demo
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from tandemrt.engines.parameters.server_tensors import CLIENT


class TritonServer:
    """A server process on one model repository, from ``start`` (or entering ``with``) to ``stop``.

    Attributes:
        http, grpc, metrics: ports; None takes free ones.
        log: file with the server's output.
    """

    def __init__(
        self,
        repository: Path,
        *,
        http: int | None = None,
        grpc: int | None = None,
        metrics: int | None = None,
        explicit: bool = False,
        models: tuple[str, ...] = (),
    ) -> None:
        """``explicit``: the client loads and unloads all models but ``models``."""
        self.repository = repository
        ports = iter(_free_ports(3))
        self.http, self.grpc, self.metrics = (port or next(ports) for port in (http, grpc, metrics))
        self._models = [f"--load-model={name}" for name in models]
        self._control = ["--model-control-mode=explicit", *self._models] if explicit else []
        self._work = Path(tempfile.mkdtemp(prefix="tandemrt-triton-"))
        self.log = self._work / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def start(self, timeout_s: float = 120.0) -> None:
        """Start and wait until every model is ready. Raises RuntimeError, with the end of the log, if it never is."""
        home, backends = _home(), self._work / "backends"
        _write_backends(home, backends)
        command = [
            str(home / "bin" / "tritonserver"),
            f"--model-repository={self.repository.resolve()}",
            f"--backend-directory={backends}",
            f"--http-port={self.http}",
            f"--grpc-port={self.grpc}",
            f"--metrics-port={self.metrics}",
            "--exit-timeout-secs=20",
            f"--grpc-header-forward-pattern={CLIENT}",
            *self._control,
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=_environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait_until_ready(self._process, timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_s: float = 30.0) -> int:
        """Ask the server to exit, and kill it after ``timeout_s``; return its exit status. May be called twice."""
        status = 0
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                status = self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                status = self._process.wait()
            with suppress(ProcessLookupError):  # its own session: stubs that a crashed server left running
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process = None
        shutil.rmtree(self._work, ignore_errors=True)
        return status

    def wait(self) -> int:
        """Wait until the server exits by itself."""
        assert self._process is not None, "start comes first"
        return self._process.wait()

    def tail(self, lines: int = 60) -> str:
        """The end of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def __enter__(self) -> "TritonServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not self._ready():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not become ready; the end of its log:\n{self.tail()}")
            time.sleep(0.1)

    def _ready(self) -> bool:
        # The server opens its port of metrics last, after the one that says that it is ready.
        pages = f"{self.url}/v2/health/ready", f"http://127.0.0.1:{self.metrics}/metrics"
        return all(_answers(page) for page in pages)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def stop_on_signals() -> None:
    """Turn SIGINT and SIGTERM into KeyboardInterrupt.

    Ending this process then stops its server, also in a background job.
    """
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)


def main(
    repository: Annotated[Path, typer.Argument(help="A model repository.")],
    model: Annotated[str, typer.Option(help="The model of the example.")] = "demo",
    http: Annotated[int, typer.Option(help="HTTP port.")] = 8000,
    grpc: Annotated[int, typer.Option(help="gRPC port.")] = 8001,
    metrics: Annotated[int, typer.Option(help="Port of /metrics.")] = 8002,
) -> None:
    """Serve REPOSITORY until Ctrl-C, and print example requests."""
    stop_on_signals()
    server = TritonServer(repository, http=http, grpc=grpc, metrics=metrics)
    print("starting the server ...", flush=True)
    try:
        server.start()
        print(_welcome(server, model), flush=True)
        status = server.wait()
        print(server.tail(), file=sys.stderr)
    except KeyboardInterrupt:
        print("\nstopping ...", flush=True)
        status = 0
    except RuntimeError as error:
        print(error, file=sys.stderr)
        status = 1
    finally:
        server.stop()
    sys.exit(status)


def _welcome(server: TritonServer, model: str) -> str:
    url = f"{server.url}/v2/models/{model}"
    order = "Please put 3 pine boxes at £4.35 apiece and 2 oak washers at £8.65 apiece on the account of Leo Conti."
    inputs = {
        "messages": json.dumps([{"role": "user", "content": order}], ensure_ascii=False),
        "guided_decoding_guide_type": "json",
        "temperature": 0.0,
    }
    return (
        f"Ready: HTTP {server.http}, gRPC {server.grpc}, metrics {server.metrics}. In another terminal:\n\n"
        f"curl -s {url}/generate -d '{json.dumps(inputs, ensure_ascii=False)}'\n\n"
        f"curl -sN {url}/generate_stream -d '{json.dumps({**inputs, 'stream': True}, ensure_ascii=False)}'\n\n"
        f"curl -s http://127.0.0.1:{server.metrics}/metrics | grep ^tandemrt_\n\n"
        "Ctrl-C stops the server."
    )


def _home() -> Path:
    package = find_spec("pytriton")
    if package is None or package.origin is None:
        raise RuntimeError("nvidia-pytriton, which holds the server, is not installed; pip install '.[triton-test]'")
    return Path(package.origin).parent / "tritonserver"


def _write_backends(home: Path, folder: Path) -> None:
    # The stub decides which Python runs the model: it must be the one that TandemRT is installed in.
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = home / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.is_file():
        has = ", ".join(sorted(path.name for path in stub.parents[1].iterdir()))
        raise RuntimeError(f"the server's wheel has stubs for Python {has}; this is Python {python}")
    shutil.copytree(home / "backends", folder)
    shutil.copy2(stub, folder / "python")


def _environment() -> dict[str, str]:
    site = Path(sysconfig.get_path("purelib"))
    libraries = [sysconfig.get_config_var("LIBDIR"), str(site / "nvidia_pytriton.libs")]
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join([*libraries, *([inherited] if inherited else [])]),
        "PYTHONPATH": ":".join([str(site), str(Path(__file__).parents[1] / "src")]),
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
    }


def _free_ports(count: int) -> list[int]:
    """Return free ports below 32,768, because Linux gives those above to the connections of other processes."""
    ports: list[int] = []
    with ExitStack() as stack:
        for port in random.SystemRandom().sample(range(10_000, 32_000), 1000):
            with suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                break
    return ports


if __name__ == "__main__":
    typer.run(main)
