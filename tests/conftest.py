"""Bundles that many tests share, built once per test process, and how hypothesis draws."""

import gc
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# Set before torch is imported: its threads spin while they wait, and the tests use all cores themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tests.makers import tiny_checkpoint, write_recipe

ROOT = Path(__file__).parents[1]

if find_spec("hypothesis"):  # the environment of a server's tests has none
    from hypothesis import settings

    # No deadlines: how long an example takes says how busy the machine is.
    settings.register_profile("random", deadline=None)
    settings.register_profile("reproducible", deadline=None, derandomize=True)
    settings.load_profile("reproducible")  # pytest --hypothesis-profile random overrides it


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of garbage collections: closing an LLM collects, 0.5 s each time here."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models of two layers and one, 4 slots, length 96, draft window 8. The text is noise."""
    folder = tmp_path_factory.mktemp("tiny")
    target = tiny_checkpoint(folder / "target", seed=1)
    draft = tiny_checkpoint(folder / "draft", layers=1, seed=1)
    recipe = write_recipe(folder / "tiny.toml", target=target, draft=draft, window=8)
    return build(Recipe.load(recipe), folder / "bundle").folder


@pytest.fixture(scope="session")
def ngram_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of ``tiny_bundle`` with n-gram drafts."""
    folder = tmp_path_factory.mktemp("ngram")
    target = tiny_checkpoint(folder / "target", seed=1)
    recipe = write_recipe(
        folder / "ngram.toml", target=target, drafting='kind = "ngram"\nnum_draft_tokens = 8\nngram_min = 1'
    )
    return build(Recipe.load(recipe), folder / "bundle").folder


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo: trained models with reasoning and JSON."""
    recipe = Recipe.load(ROOT / "engines" / "recipes" / "demo.toml")
    return build(recipe, tmp_path_factory.mktemp("demo") / "bundle").folder
