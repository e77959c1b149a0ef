"""Messages and pages name extras that exist, by commands that work."""

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.engines.validation.extras import pip_install
from tandemrt.export.triton.config import model_config

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOLDERS = ("engines", "export", "plugins", "runtime", "src/tandemrt", "tools")
SOURCES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *(file for name in FOLDERS for file in (ROOT / name).rglob("*.py")),
]


def test_the_advice_names_the_extra_in_a_checkout_and_by_name() -> None:
    assert pip_install("serve") == "pip install '.[serve]' in a checkout, else pip install 'tandemrt[serve]'"
    assert pip_install("cpu", "cuda").startswith("pip install '.[cpu]' or '.[cuda]' in a checkout, else")


@pytest.mark.parametrize("pattern", [r"pip_install\([\"']([\w-]+)[\"']\)", r"pip install '\.\[([\w,-]+)\]'"])
def test_every_extra_that_is_named_exists(pattern: str) -> None:
    named = {name for file in SOURCES for group in re.findall(pattern, file.read_text()) for name in group.split(",")}
    assert named
    assert named <= EXTRAS.keys()


def test_every_page_and_message_installs_from_the_checkout_first() -> None:
    assert [file for file in SOURCES if "'tandemrt[" in file.read_text() and file.name != "CHANGELOG.md"] == []


def test_a_tritonclient_without_its_grpc_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises RuntimeError when it is imported."""
    (tmp_path / "grpc.py").write_text("raise RuntimeError('The installation does not include grpc support.')\n")
    package = ModuleType("tritonclient")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "tritonclient", package)
    monkeypatch.delitem(sys.modules, "tritonclient.grpc", raising=False)
    with pytest.raises(BackendUnavailable, match=r"tritonclient: .*\(The installation .*pip install '\.\[triton\]'"):
        model_config("demo", parameters={})
