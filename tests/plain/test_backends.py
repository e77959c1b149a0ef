"""A backend is one class: no other code knows its name, and its folders have what the class promises."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from tandemrt.engines.recipe.backends import BACKENDS

ROOT = Path(__file__).parents[2]
# The names of backends as constants of engines/recipe/backends.py: other code may only recommend them in messages.
CONSTANTS = {"CPU", "CUDA", "PAGED"}
PACKAGES = ("engines", "plugins", "export", "runtime")
MODULES = {
    "tandemrt.export.compile.{}.builder": ("build",),
    "tandemrt.runtime.device.backends.{}.opener": ("engine_opener", "require_memory", "backend_status"),
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


def test_other_code_names_a_backend_only_in_texts() -> None:
    folders = tuple(f"/{backend.folder}/" for backend in BACKENDS.values())
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    wrong = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in files
        if "engines/recipe/" not in file.as_posix() and not any(folder in file.as_posix() for folder in folders)
        for line in _lines_that_use_constants(ast.parse(file.read_text()))
    ]
    assert wrong == []


def _lines_that_use_constants(tree: ast.Module) -> list[int]:
    """Return the lines that use CONSTANTS of engines/recipe/backends.py outside of f-strings."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {a.name for node in imports if node.module == "tandemrt.engines.recipe.backends" for a in node.names}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    in_texts = {name for text in texts for name in ast.walk(text)}
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names & CONSTANTS]
    return [node.lineno for node in used if node not in in_texts]
