"""The bundle of a real model, the same as `make real` builds."""

from pathlib import Path

import pytest

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tools.real.checkpoint import make

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """SmolLM2-135M-Instruct, unpacked once per clone."""
    return make(ROOT / "engines" / "built" / "real" / "checkpoint")


@pytest.fixture(scope="session")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001  (the recipe names it)
    recipe = Recipe.load(ROOT / "tools" / "real" / "recipe.toml")
    return build(recipe, tmp_path_factory.mktemp("real") / "bundle").folder
