"""An engine's process, seen from the driver."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from tools.bench_cpu.environments import ROOT


class Worker:
    """Started when made. ``seconds`` from there to its first token, ``peak_mb`` up to there, imports included.

    Raises OSError if it ends before.
    """

    def __init__(self, python: Path, engine: str, model: str, threads: int, errors: Path) -> None:
        command = [str(python), "-m", f"tools.bench_cpu.workers.{engine}", model, str(threads)]
        start = time.perf_counter()
        with errors.open("w") as stderr:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self._errors = errors
        first = self._hear()
        self.seconds = time.perf_counter() - start
        self.peak_mb = float(first["peak_mb"])

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What the engine answers (protocol.serve). Raises OSError if it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            said = self._errors.read_text().strip().splitlines()
            raise OSError(f"its process ended: {(said or ['without a word'])[-1][:200]}")
        answer: dict[str, Any] = json.loads(line)
        return answer
