"""What pip installs: a bundle on a CPU runs without torch, and nothing but EBNF grammars needs xgrammar."""

import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def sizes(*extras: str) -> dict[str, int]:
    """Return the bytes of every package that ``pip install '.[extras]'`` would install here, by name."""
    todo = [Requirement(each) for each in [*PROJECT["dependencies"], *(e for extra in extras for e in EXTRAS[extra])]]
    nbytes: dict[str, int] = {}
    while todo:
        wanted = todo.pop()
        name = wanted.name.lower().replace("_", "-")
        if name in nbytes:
            continue
        installed = distribution(name)
        files = [Path(str(file.locate())) for file in installed.files or []]
        nbytes[name] = sum(file.stat().st_size for file in files if file.is_file())
        for line in installed.requires or []:
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in wanted.extras or {""}):
                todo.append(needed)
    return nbytes


def test_a_bundle_on_a_cpu_needs_350_mb() -> None:
    nbytes = sizes("cpu")
    assert not nbytes.keys() & {"torch", "triton", "transformers", "xgrammar"}
    assert sum(nbytes.values()) < 350e6


def test_building_adds_torch_alone() -> None:
    assert "torch" in sizes("cpu", "build")
    assert not sizes("cpu", "build").keys() & {"transformers", "xgrammar"}
    assert not sizes("cpu", "serve").keys() & {"torch", "transformers", "xgrammar"}
