"""Imports point one way (docs/design.md, section 1)."""

import ast
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


def _imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "tandemrt")
    return names
