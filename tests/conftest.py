"""Bundles that many tests share, built once for all processes of pytest-xdist, and how hypothesis draws."""

import fcntl
import gc
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import onnxruntime
import pytest

# Set before torch is imported: its threads spin while they wait, and the tests use all cores themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tandemrt.engines.recipe.recipe import Recipe
from tests.makers import tiny_checkpoint, write_recipe

ROOT = Path(__file__).parents[1]

# Imports make many objects that stay, and the default thresholds read all of them again and again.
gc.set_threshold(20_000, 20, 100)

if find_spec("hypothesis"):  # the environment of a server's tests has none
    from hypothesis import settings

    # No deadlines: how long an example takes says how busy the machine is.
    settings.register_profile("random", deadline=None)
    settings.register_profile("reproducible", deadline=None, derandomize=True)
    settings.load_profile("reproducible")  # pytest --hypothesis-profile random overrides it


@pytest.fixture(scope="module", autouse=True)
def frozen_objects() -> None:
    """Leave what lived before this module out of garbage collections: closing an LLM collects, 0.5 s each time here."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Let a session of onnxruntime have one thread where a test asks for no number: others spin during its runs."""

    class Options(onnxruntime.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = 1

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(onnxruntime, "SessionOptions", Options)
        yield


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models of two layers and one, 4 slots, length 96, draft window 8. The text is noise."""

    def write(folder: Path) -> Path:
        target = tiny_checkpoint(folder / "target", seed=1)
        draft = tiny_checkpoint(folder / "draft", layers=1, seed=1)
        return write_recipe(folder / "tiny.toml", target=target, draft=draft, window=8)

    return shared_bundle(tmp_path_factory, "tiny", write)


@pytest.fixture(scope="session")
def ngram_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of ``tiny_bundle`` with n-gram drafts."""

    def write(folder: Path) -> Path:
        target = tiny_checkpoint(folder / "target", seed=1)
        drafting = 'kind = "ngram"\nnum_draft_tokens = 8\nngram_min = 1'
        return write_recipe(folder / "ngram.toml", target=target, drafting=drafting)

    return shared_bundle(tmp_path_factory, "ngram", write)


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo: trained models with reasoning and JSON."""
    return shared_bundle(tmp_path_factory, "demo", lambda _: ROOT / "engines" / "recipes" / "demo.toml")


def shared_bundle(folders: pytest.TempPathFactory, name: str, write: Callable[[Path], Path]) -> Path:
    """Build the recipe that ``write`` returns, in the first process that asks for it; return the bundle.

    ``write`` gets a folder for checkpoints.
    """
    from tandemrt.export.bundle.build import build  # imports torch, which many tests do not need

    folder = shared_folder(folders, name)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "bundle").exists():  # a build renames it last
            build(Recipe.load(write(folder)), folder / "bundle")
    return folder / "bundle"


def shared_folder(folders: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that all processes of pytest-xdist have."""
    own = folders.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    folder.mkdir(exist_ok=True)
    return folder
