"""Find checkpoints that a recipe names as on the Hugging Face hub: in the local cache, or fetch them into it."""

from collections.abc import Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tandemrt.engines.options.build_listener import SILENT, BuildListener
from tandemrt.engines.options.model_name import HUB_NAME
from tandemrt.engines.recipe.models import HeadDraft
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadRecipe, clipped, quoted
from tandemrt.export.read.checkpoint import read_index
from tandemrt.export.read.file_formats import other_format
from tandemrt.export.read.original_tokenizers import find_original

WEIGHTS = "model*.safetensors"
FILES = ["*.json", "*.jinja", "merges.txt", "tokenizer.model", WEIGHTS]
MODEL_FILES = frozenset({"config.json", "tokenizer.json"})
HEAD_FILES = frozenset({"config.json"})
OTHERS = ["*/*.json", "*/*.txt", "*/*.safetensors"]  # the same model in other formats: original/, onnx/


def resolve_checkpoints(recipe: Recipe, listener: BuildListener = SILENT) -> Recipe:
    """Return ``recipe`` with a local folder for every checkpoint that it names.

    A path of an existing folder, relative to the recipe, is kept. A hub name, ``OWNER/NAME`` or
    ``OWNER/NAME@REVISION``, is looked up in the hub's cache (HF_HOME), and fetched if the cache does not have all
    files. ``listener`` receives a title before a download, and megabytes during it. Raises BadRecipe for a checkpoint
    that is neither a folder nor available from the hub.
    """
    changed: dict[str, Any] = {}
    for role, checkpoint in recipe.checkpoints().items():
        name = None if checkpoint.is_dir() else recipe.hub_name(checkpoint)
        if name is None or not HUB_NAME.fullmatch(name):
            continue
        head = role == "draft" and isinstance(recipe.draft, HeadDraft)
        needed = HEAD_FILES if head else MODEL_FILES
        folder = fetch(name, f"{role}.checkpoint", listener, needed=needed)
        changed[role] = getattr(recipe, role).model_copy(update={"checkpoint": folder})
    recipe = recipe.model_copy(update=changed)
    recipe.require_checkpoints()
    return recipe


def fetch(name: str, key: str, listener: BuildListener, *, needed: Set[str] = MODEL_FILES) -> Path:
    """Return the folder in the hub's cache of a checkpoint, with the files ``needed`` and its weights.

    ``name`` must match HUB_NAME. A checkpoint that is not complete in the cache is fetched. Raises BadRecipe with
    ``key``.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    repository, _, rest = name.partition("@")
    revision = rest or None
    snapshot = partial(snapshot_download, repository, revision=revision, allow_patterns=FILES, ignore_patterns=OTHERS)
    try:
        with suppress(LocalEntryNotFoundError):
            cached = Path(snapshot(local_files_only=True))
            if _is_complete(cached, needed):
                return cached
        listener.begin(f"Fetch {name} from the Hugging Face hub")
        fetched = Path(snapshot(tqdm_class=_bar(listener)))
        if _is_complete(fetched, needed):
            return fetched
        names = HfApi().list_repo_files(repository, revision=revision)  # offline, `fetched` was the cache's folder
        other = None if any(fetched.glob(WEIGHTS)) else other_format(names)
    except GatedRepoError:
        why = "ask for access on its page, then log in: hf auth login"
    except RepositoryNotFoundError:
        why = "the hub has no such repository, or not for you (hf auth login)"
    except Exception as error:  # errors of network, disk and hub have no common base class
        why = clipped(error)
    else:
        if other is None:  # the reader reports the missing file
            return fetched
        raise BadRecipe(f"{key}: a checkpoint is config.json and {WEIGHTS}; {quoted(name)} holds {other}")
    raise BadRecipe(
        f"{key}: must be an existing folder or a name of the Hugging Face hub; got {quoted(name)}, which is not a "
        f"folder, is not complete in the hub's cache, and could not be fetched: {why}"
    )


def _is_complete(folder: Path, needed: Set[str]) -> bool:
    """Whether a cache folder has all files of a checkpoint: other programs may have fetched only some of them."""
    index = folder / "model.safetensors.index.json"
    shards = set(read_index(index).values()) if index.is_file() else {"model.safetensors"}
    converted = {"tokenizer.json"} if find_original(folder) is not None else set()
    return all((folder / name).is_file() for name in (needed - converted) | shards)


def _bar(listener: BuildListener) -> Any:
    """Return a progress bar class for the hub's client that draws nothing and tells ``listener``."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    base: Any = tqdm

    class ProgressBar(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **options | {"disable": listener is SILENT})

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and self.total:
                listener.detail("MB", int(self.n / 1e6), int(self.total / 1e6))

    return ProgressBar
