"""The process of an engine, as seen by the driver."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from tools.bench.cpu.environments import ROOT


class Worker:
    """A started process. ``seconds``: from the start to the first token, imports included. ``peak_mb``: memory by then.

    Raises OSError if the process ends before.
    """

    def __init__(self, python: Path, engine: str, model: str, threads: int, errors: Path) -> None:
        command = [str(python), "-m", f"tools.bench.cpu.workers.{engine}", model, str(threads)]
        # Installed packages have compiled modules. Here the first start, which is not counted, compiles them.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(errors.parent / "pycache")
        start = time.perf_counter()
        with errors.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._errors = errors
        first = self._read()
        self.seconds = time.perf_counter() - start
        self.peak_mb = float(first["peak_mb"])

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the engine's answer (protocol.serve). Raises OSError if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            said = self._errors.read_text().strip().splitlines()
            raise OSError(f"its process ended: {(said or ['no message'])[-1][:200]}")
        answer: dict[str, Any] = json.loads(line)
        return answer
