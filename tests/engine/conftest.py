"""What the tests of this folder share: quick builds, the command line, and a clock that goes as a test wants it."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandemrt.cli import main
from tandemrt.engines.contract.operators import WEIGHTLESS_ENGINES
from tandemrt.export.compile.onnxruntime import builder
from tandemrt.plugins.kernels import compile as compiler
from tandemrt.plugins.kernels import nvrtc
from tandemrt.plugins.kernels.nvrtc import Program, Result
from tests.closed_loops import sound_loops  # noqa: F401  # a fixture
from tests.conftest import shared_folder
from tests.outputs import consistent_outputs  # noqa: F401  # a fixture
from tests.waiting import Clock

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session", autouse=True)
def graphs_optimized_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Optimize engines without weights, which are equal in most bundles, in the first build that has them.

    That takes 1.3 s of processor time, most of the build of a tiny bundle.
    """
    folder, require_session = shared_folder(tmp_path_factory, "optimized"), builder.require_session

    def require_once(path: Path, *, optimize: bool) -> bool:
        if path.stem not in WEIGHTLESS_ENGINES:
            return require_session(path, optimize=optimize)
        key = hashlib.sha256(path.read_bytes()).hexdigest()
        kept = folder / f"{key}-{optimize}"
        if kept.exists():
            path.write_bytes(kept.read_bytes())
            return optimize
        optimized = require_session(path, optimize=optimize)
        if optimized == optimize:
            partial = folder / f"{key}-{os.getpid()}"
            partial.write_bytes(path.read_bytes())
            partial.replace(kept)
        return optimized

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(builder, "require_session", require_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_compiler() -> Iterator[None]:
    """Let NVRTC optimize little: no GPU runs the kernels of these tests, and it takes a quarter of the time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nvrtc, "_OPTIONS", (*nvrtc._OPTIONS, "--Ofast-compile=max"))
        yield


@pytest.fixture(scope="module", autouse=True)
def kernels_of_bundles() -> Iterator[None]:
    """Compile no kernels into bundles: nothing here runs them, and test_kernels.py compiles all of them.

    What TensorRT builds in is compiled. A module overrides this if it reads kernels.
    """

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiler, "compile_program", compile_for_tensorrt)
        yield


def compile_for_tensorrt(program: Program, target: str) -> Result:
    """Compile what TensorRT builds in, and nothing else."""
    if program.file == "source.cu":
        return nvrtc.compile_program(program, target)
    return Result(b"\x7fELF", b".version 9.0", "")


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in the module's ``folder``; gives exit code, standard output and standard error."""
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tandemrt", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def clock() -> Iterator[Clock]:
    """The runtime's clock, in the hands of the test."""
    with pytest.MonkeyPatch.context() as patched:
        yield Clock(patched)
