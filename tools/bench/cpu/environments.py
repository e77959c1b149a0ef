"""Create an environment for each engine in a folder, once."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {  # packages of each call of pip
    "genai": (("onnxruntime-genai",), ("torch", "transformers", "onnx_ir", "safetensors")),
    "openvino": (("openvino-genai",),),
    "llama_cpp": (("llama-cpp-python",),),
    "transformers": (("torch", "transformers"),),
}


@dataclass(frozen=True)
class Environment:
    """A Python with an engine installed."""

    python: Path

    def version(self, engine: str) -> str:
        """Return the package of ``engine`` with its version."""
        package = PACKAGES.get(engine, (("onnxruntime",),))[0][-1]
        code = f"import importlib.metadata as m; print({package!r}, m.version({package!r}))"
        ran = subprocess.run([self.python, "-c", code], capture_output=True, text=True)
        return ran.stdout.strip()


def prepare(engine: str, folder: Path, *, timeout_s: float) -> Environment:
    """Return the environment of ``engine`` in ``folder``, created if missing.

    Raises OSError with the reason of a failure.
    """
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
