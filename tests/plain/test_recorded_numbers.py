"""Limits, and other numbers that are constants or default values, in every package: equal to the recorded."""

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

import tandemrt
from tests.recorded import require_recorded

LAYERS = ("engines", "plugins", "export", "runtime")
TRITON = "tandemrt.runtime.servers.triton."  # its modules import one that exists only inside Triton
RAY = "tandemrt.runtime.servers.ray"  # its modules import ray, which is not in every environment


def packages() -> Iterator[str]:
    for layer in LAYERS:
        package = importlib.import_module(f"{tandemrt.__name__}.{layer}")
        yield from (info.name for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.") if info.ispkg)


def modules(name: str) -> Iterator[ModuleType]:
    package = importlib.import_module(name)
    yield package
    for info in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not info.name.endswith(".__main__") and not info.name.startswith(RAY):
            yield importlib.import_module(info.name)


@pytest.fixture
def _inside_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Triton's modules be imported, and remove those that were not loaded before: their Triton is empty."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", ModuleType("triton_python_backend_utils"))
    loaded = set(sys.modules)
    yield
    for name in [name for name in sys.modules if name.startswith(TRITON) and name not in loaded]:
        del sys.modules[name]


def defaults(name: str, member: Any) -> Iterator[tuple[str, Any]]:
    """The default values of the arguments of a function, or of the fields and methods of a class."""
    if inspect.isclass(member):
        if issubclass(member, BaseModel):
            yield from ((f"{name}.{field}", row.default) for field, row in member.model_fields.items())
        for method, function in vars(member).items():
            if inspect.isfunction(function):
                yield from defaults(f"{name}.{method}", function)
    elif inspect.isfunction(member):
        for argument in inspect.signature(member).parameters.values():
            if argument.default is not argument.empty:
                yield f"{name}({argument.name})", argument.default


def values(module: ModuleType) -> Iterator[str]:
    body = ast.parse(Path(module.__file__ or "").read_text()).body
    imported = {alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    for name, member in vars(module).items():
        if re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name) and name not in imported:
            plain: Iterator[tuple[str, Any]] = iter([(name, member)])
        elif getattr(member, "__module__", None) == module.__name__:
            plain = defaults(name, member)
        else:
            continue
        for place, value in plain:
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield f"{module.__name__}.{place} {value}"


@pytest.mark.usefixtures("_inside_triton")
@pytest.mark.parametrize("package", [*packages()])
def test_numbers_of_a_package_are_those_recorded(package: str) -> None:
    lines = {line for module in modules(package) for line in values(module)}
    require_recorded(f"numbers/{package.partition('.')[2]}", sorted(lines))
