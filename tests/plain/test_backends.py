"""A backend is one class: no other code knows its name, and its folders have what the class promises."""

import importlib
import re
from pathlib import Path

import pytest

from tandemrt.engines.recipe.backends import BACKENDS

ROOT = Path(__file__).parents[2]
PACKAGES = ("engines", "plugins", "export", "runtime")
MODULES = {
    "tandemrt.export.compile.{}.builder": ("build",),
    "tandemrt.runtime.device.backends.{}.opener": ("open_engine", "require_memory"),
    "tandemrt.runtime.device.backends.{}.status": ("backend_status",),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("module", MODULES)
def test_the_folders_of_a_backend_have_what_its_class_promises(name: str, module: str) -> None:
    folder = importlib.import_module(module.format(BACKENDS[name].folder))
    assert all(callable(getattr(folder, function)) for function in MODULES[module])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_named_in_its_class_and_its_folders(name: str) -> None:
    # TensorRT's name is also that of a Python module and a folder: only a quoted literal is the backend's.
    literal = re.compile(rf"[\"']{name}[\"']" if name == "tensorrt" else rf"{name}(?!-)\b")
    own = ("engines/recipe", f"/{BACKENDS[name].folder}/")
    naming = [
        file.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if literal.search(file.read_text())
    ]
    assert [file for file in naming if not any(folder in file for folder in own)] == []


@pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if backend.library is not None])
def test_the_versions_of_a_library_agree(name: str) -> None:
    library = BACKENDS[name].library
    assert library is not None
    assert {int(version.split(".")[0]) for version in library.tested.split(", ")} == set(library.runs)
    assert set(library.opens) == set(library.runs)
    assert set(library.builds) <= set(library.runs)
