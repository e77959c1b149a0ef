"""Imports follow the layers of packages and of their rooms (docs/design.md), and name existing objects."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "engines": {"engines"},
    "plugins": {"engines", "plugins"},
    "export": {"engines", "plugins", "export"},
    "runtime": {"engines", "plugins", "runtime"},
}
# The one module that leaves its package's layer: it builds what is not a bundle yet, and is loaded only then.
BUILDS_ON_DEMAND = ("runtime/llm/on_demand.py", "tandemrt.export.cli.console_build")

# The rooms of each package, lowest layer first: a subfolder, or a module at the top of the package. A room imports only
# rooms of lower layers, also for type checking; rooms of one layer do not import each other.
ROOMS = {
    "engines": ("parallel user_cache validation", "contract text", "bundle recipe", "options parameters"),
    "plugins": ("tensors", "operators", "functions kernels reference", "onnxruntime tensorrt", "implementations"),
    "export": ("read staging", "graph triton", "model passes quantize", "compile", "bundle", "cli"),
    "runtime": (
        "metrics workers",
        "device",
        "caches",
        "grammars",
        "constraints",
        "requests",
        "drafters",
        "engine_loop",
        "trace",
        "llm",
        "check servers",
        "cli",
    ),
}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_package_imports_only_the_packages_below_it(folder: str) -> None:
    files = _files(folder)
    assert files
    wrong = {
        f"{file.relative_to(ROOT)}: {module}"
        for file in files
        for module in _imported(file)
        if (file.relative_to(ROOT).as_posix(), module) != BUILDS_ON_DEMAND
        if module.startswith("tools")
        or (module.startswith("tandemrt.") and module.split(".")[1] not in {*MAY_IMPORT[folder], "__version__"})
    }
    assert not wrong


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_of_a_package_has_a_layer(package: str) -> None:
    listed = " ".join(ROOMS[package]).split()
    assert sorted(listed) == sorted({_room(package, file) for file in _files(package)} - {"__init__"})


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_only_rooms_of_lower_layers(package: str) -> None:
    layers = {room: at for at, rooms in enumerate(ROOMS[package]) for room in rooms.split()}
    wrong = {
        f"{file.relative_to(ROOT)}: {package}/{imported}"
        for file in _files(package)
        for imported in _rooms_imported(package, file)
        if imported != (room := _room(package, file)) and layers[imported] >= layers[room]
    }
    assert not wrong


@pytest.mark.parametrize("package", ROOMS)
def test_modules_import_each_other_in_no_circle(package: str) -> None:
    """Also inside functions and for type checking. CycleError names the modules of a circle."""
    TopologicalSorter({file: _files_imported(file) for file in _files(package)}).prepare()


def test_the_engines_folder_needs_neither_torch_nor_an_engine_library() -> None:
    heavy = {"torch", "onnx", "onnx_ir", "onnxruntime", "transformers", "xgrammar"}
    assert not {m for f in _files("engines") for m in _imported(f) if m.split(".")[0] in heavy}


def test_opening_a_bundle_does_not_import_the_graph_library() -> None:
    """The import of onnx_ir takes half a second of a start."""
    device = [file for file in _files("runtime") if "/device/" in str(file)]
    assert device
    assert not {(file, name) for file in device for name in _imported(file) if name.split(".")[0] == "onnx_ir"}


def test_the_package_is_the_four_folders_under_one_name() -> None:
    for folder in MAY_IMPORT:
        link = ROOT / "src" / "tandemrt" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", ["gpu", "ray", "real", "serve", "tensorrt", "vocabularies"])
def test_tests_of_other_environments_import_existing_names(folder: str) -> None:
    """Most test runs do not import these tests and would miss a renamed object."""
    files = [ROOT / "tests" / "conftest.py", *(ROOT / "tests" / folder).rglob("*.py")]
    asked = {(file, module, name) for file in files for module, name in _asked_of_the_project(file)}
    assert asked
    missing = [f"{f.relative_to(ROOT)}: {m}.{n}" for f, m, n in asked if n not in _names(m) and not _names(f"{m}.{n}")]
    assert not missing


def _files_imported(file: Path) -> set[Path]:
    modules = {each for module, name in _asked_of_the_project(file) for each in (module, f"{module}.{name}")}
    files = {ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py") for module in modules}
    return {each for each in files if each.is_file()}


def _asked_of_the_project(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("tandemrt", "tests", "tools"):
            yield from ((str(node.module), alias.name) for alias in node.names)


@cache
def _names(module: str) -> frozenset[str]:
    """Return the names at the top of a module of the project; none if there is no such module."""
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


def _files(package: str) -> list[Path]:
    return [file for file in (ROOT / package).rglob("*.py") if "built" not in file.parts]


def _room(package: str, file: Path) -> str:
    return file.relative_to(ROOT / package).parts[0].removesuffix(".py")


def _rooms_imported(package: str, file: Path) -> set[str]:
    """Return the rooms of ``package`` that ``file`` imports, also inside functions and for type checking."""
    parts = [module.split(".") for module in _imported(file, package)]
    return {part[2] for part in parts if part[:2] == ["tandemrt", package] and len(part) > 2}


def _imported(file: Path, package: str = "") -> set[str]:
    """Return the modules that ``file`` imports; of ``tandemrt`` and its ``package`` the imported names too."""
    whole = ("tandemrt", f"tandemrt.{package}")
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names if node.module in whole)
    return names
