"""``tandemrt doctor WHAT``: names what must be installed, and nothing else."""

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from tandemrt.engines.recipe import backend_status
from tandemrt.engines.recipe.backend_status import BackendStatus
from tandemrt.engines.recipe.tensorrt import TensorRt
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.engines.validation.extras import pip_install
from tandemrt.runtime.cli import doctor
from tandemrt.runtime.device.backends.tensorrt import opener
from tests.command_line import app
from tests.plain.test_bundle import write_bundle


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The packages that the machine has."""
    packages: dict[str, str] = {}
    monkeypatch.setattr(backend_status, "package_version", packages.get)
    return packages


def test_only_missing_packages_of_an_extra_are_named(installed: dict[str, str]) -> None:
    installed |= {"fastapi": "1", "markdown-it-py": "4", "python-multipart": "1", "uvicorn": "1"}
    assert doctor.missing("serve") == [f"serve needs prometheus-client: {pip_install('serve')}"]
    installed["prometheus-client"] = "1"
    assert doctor.missing("serve") == []
    installed["fastapi"] = "0.100"
    assert doctor.missing("serve") == [f"serve needs fastapi>=0.120 instead of 0.100: {pip_install('serve')}"]


@pytest.mark.parametrize("extra", importlib.metadata.metadata("tandemrt").get_all("Provides-Extra", []))
def test_every_extra_of_the_package_is_accepted(installed: dict[str, str], extra: str) -> None:
    assert installed == {}
    (line,) = doctor.missing(extra)
    assert line.startswith(f"{extra} needs ")


def test_an_extra_needs_the_packages_of_the_extras_that_it_names(installed: dict[str, str]) -> None:
    installed |= {"gguf": "1", "transformers": "5"}
    assert doctor.missing("gguf") == [f"gguf needs torch: {pip_install('gguf')}"]


def test_onnxruntime_for_a_gpu_replaces_that_for_a_cpu(installed: dict[str, str]) -> None:
    installed["onnxruntime-gpu"] = "2"
    assert doctor.missing("cpu") == []
    installed["onnxruntime-gpu"] = "1.2"
    assert doctor.missing("cpu")[0].startswith("cpu needs onnxruntime>=1.31 instead of 1.2: ")


def test_a_backend_names_its_extra(installed: dict[str, str]) -> None:
    assert doctor.missing("onnxruntime-cpu") == [f"onnxruntime-cpu needs: {pip_install('cpu')}"]
    installed["onnxruntime"] = "1"
    assert doctor.missing("onnxruntime-cpu") == []


def test_a_bundle_needs_its_backend(installed: dict[str, str], tmp_path: Path) -> None:
    write_bundle(tmp_path)
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert (result.exit_code, result.output) == (1, f"onnxruntime-cpu needs: {pip_install('cpu')}\n")
    installed["onnxruntime-gpu"] = "99"
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert (result.exit_code, result.output) == (0, "nothing is missing\n")


def test_a_tensorrt_that_only_runs_says_what_it_opens_and_what_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    lean = ModuleType("tensorrt_lean_bindings")
    lean.__version__ = "10.16.1.11"  # type: ignore[attr-defined]
    for name in TensorRt.library.modules:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "tensorrt_lean_bindings", lean)
    monkeypatch.setattr(opener, "gpus", lambda: ["a GPU"])
    tensorrt = opener.backend_status("tensorrt")
    assert tensorrt.version == "10.16.1.11"
    assert tensorrt.builds.startswith(
        "no, or with another interpreter (backend.python): backend tensorrt needs the module"
    )
    assert tensorrt.runs == (
        "yes; this release opens its own plans and version-compatible plans of 8.6 and of earlier releases of 10"
    )
    monkeypatch.setattr(opener, "gpus", list)
    tensorrt = opener.backend_status("tensorrt")
    assert tensorrt.runs == "needs a CUDA GPU and a torch built for CUDA"


def test_an_unknown_name_is_refused_with_the_known_names() -> None:
    with pytest.raises(
        BadRequest, match=r"WHAT: must be one of onnxruntime-cpu, .*, triton, .* or the folder of a bundle"
    ):
        doctor.missing("gpu")


def test_the_table_is_narrow_and_advice_follows_uncut(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed |= {"onnxruntime": "1", "torch": "2"}
    monkeypatch.setenv("COLUMNS", "60")
    printed = CliRunner().invoke(app, ["doctor"]).output.splitlines()
    advice = next(line for line in printed if line.startswith("onnxruntime-cuda, to run: "))
    assert advice.endswith(f"pip uninstall onnxruntime, then {pip_install('cuda')}")
    row = next(line for line in printed if line.strip().startswith("onnxruntime-cuda "))
    assert row.split()[0::2] == ["onnxruntime-cuda", "-", "yes", "no"]


@pytest.mark.parametrize(
    ("builds", "runs", "notes"),
    [
        ("yes", "yes", []),
        ("yes", "needs: pip install it", ["cpu, to run: pip install it"]),
        ("needs version 11: pip", "needs version 11: pip", ["cpu: needs version 11: pip"]),
        ("yes, ahead", "needs a GPU", ["cpu, to build: yes, ahead", "cpu, to run: needs a GPU"]),
    ],
)
def test_a_backend_notes_what_is_missing(builds: str, runs: str, notes: list[str]) -> None:
    assert BackendStatus("cpu", "1", builds, runs).notes() == notes
