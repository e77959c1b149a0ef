"""Imports point one way (docs/design.md, section 1), and to what is there."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "engines": {"engines"},
    "plugins": {"engines", "plugins"},
    "export": {"engines", "plugins", "export"},
    "runtime": {"engines", "plugins", "runtime"},
}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_what_stands_before_it(folder: str) -> None:
    files = [f for f in (ROOT / folder).rglob("*.py") if "built" not in f.parts]
    assert files
    wrong = {
        f"{file.relative_to(ROOT)}: {module}"
        for file in files
        for module in _imported(file)
        if module.startswith("tools")
        or (module.startswith("tandemrt.") and module.split(".")[1] not in {*MAY_IMPORT[folder], "__version__"})
    }
    assert not wrong


def test_the_engines_folder_needs_neither_torch_nor_an_engine_library() -> None:
    heavy = {"torch", "onnx", "onnx_ir", "onnxruntime", "transformers", "xgrammar"}
    files = [f for f in (ROOT / "engines").rglob("*.py") if "built" not in f.parts]
    assert not {m for f in files for m in _imported(f) if m.split(".")[0] in heavy}


def test_the_package_is_the_four_folders_under_one_name() -> None:
    for folder in MAY_IMPORT:
        link = ROOT / "src" / "tandemrt" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", ["gpu", "real", "serve", "tensorrt", "vocabularies"])
def test_what_tests_of_other_environments_import_of_the_project_is_there(folder: str) -> None:
    """Most test runs do not import them, and would not see a name that has moved."""
    files = [ROOT / "tests" / "conftest.py", *(ROOT / "tests" / folder).rglob("*.py")]
    asked = {(file, module, name) for file in files for module, name in _asked_of_the_project(file)}
    assert asked
    missing = [f"{f.relative_to(ROOT)}: {m}.{n}" for f, m, n in asked if n not in _names(m) and not _names(f"{m}.{n}")]
    assert not missing


def _asked_of_the_project(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("tandemrt", "tests", "tools"):
            yield from ((str(node.module), alias.name) for alias in node.names)


@cache
def _names(module: str) -> frozenset[str]:
    """What a module of the project holds at its top; nothing if there is none."""
    path = ROOT / "src" / Path(*module.split(".")) if module.startswith("tandemrt") else ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return frozenset({"__path__"} if path.is_dir() else ())
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return frozenset(names)


def _imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "tandemrt")
    return names
