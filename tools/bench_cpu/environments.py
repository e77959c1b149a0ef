"""An environment for each engine, made once in a folder and kept there."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {  # what pip installs, one call after the other
    "genai": (("onnxruntime-genai",), ("torch", "transformers", "onnx_ir", "safetensors")),
    "openvino": (("openvino-genai",),),
    "llama_cpp": (("llama-cpp-python",),),
    "transformers": (("torch", "transformers"),),
}


@dataclass(frozen=True)
class Environment:
    """A Python that has an engine."""

    python: Path

    def version(self, package: str) -> str:
        """The version of an installed package, "" without it."""
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        ran = subprocess.run([self.python, "-c", code], capture_output=True, text=True)
        return ran.stdout.strip()


def prepare(engine: str, folder: Path, *, timeout_s: float) -> Environment:
    """The environment of ``engine`` under ``folder``, made if it is not there. Raises OSError with why it cannot be."""
    if engine not in PACKAGES:
        return Environment(Path(sys.executable))
    home = folder / engine
    environment = Environment(home / "bin" / "python")
    done = home / ".installed"
    if done.is_file():
        return environment
    _run([sys.executable, "-m", "venv", str(home)], timeout_s)
    for packages in PACKAGES[engine]:
        pip = [
            str(environment.python),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--quiet",
            "install",
            "--no-compile",
        ]
        _run([*pip, *packages], timeout_s)
    done.touch()
    return environment


def _run(command: list[str], timeout_s: float) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"not installed within {timeout_s:.0f} s") from error
    if ran.returncode:
        raise OSError((ran.stderr.strip().splitlines() or ["it failed without a word"])[-1][:200])
