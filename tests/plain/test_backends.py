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
    """ "tensorrt" is also a Python module and a folder; only a quoted literal is the backend's name."""
    literal = re.compile(rf"[\"']{name}[\"']" if name == "tensorrt" else rf"{name}(?!-)\b")
    own = ("engines/recipe", f"/{BACKENDS[name].folder}/")
    files = [file.relative_to(ROOT).as_posix() for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert [
        file for file in files if literal.search((ROOT / file).read_text()) and not any(o in file for o in own)
    ] == []
