"""Tests that need another machine or environment name only what is there: else they fail where nobody sees it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ELSEWHERE = ("gpu", "real", "serve", "tensorrt", "vocabularies")
OURS = {"tandemrt": ROOT / "src" / "tandemrt", "tests": ROOT / "tests", "tools": ROOT / "tools"}
MODULES = sorted(path for folder in ELSEWHERE for path in (ROOT / "tests" / folder).rglob("*.py"))


def test_there_are_such_tests() -> None:
    assert {path.parent.name for path in MODULES} >= set(ELSEWHERE)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_what_a_module_imports_of_ours_is_there(path: Path) -> None:
    missing = [f"{module}.{name}" for module, name in imports(path) if not has(module, name)]
    assert not missing


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Modules of ours and the names that are imported from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in OURS:
            yield from ((node.module, alias.name) for alias in node.names)


def has(module: str, name: str) -> bool:
    top, *parts = module.split(".")
    place = OURS[top].joinpath(*parts)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if (place / name).is_dir() or (place / f"{name}.py").exists():
        return True
    return file.exists() and name in defined(file)


@cache
def defined(path: Path) -> set[str]:
    """What a module's own statements give a name to, in blocks too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name.partition(".")[0] for alias in names}
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found
