"""Checkpoints that a recipe names as the Hugging Face hub does: from the hub's local cache, or fetched into it."""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tandemrt.engines.errors import BadRecipe, clipped, quoted
from tandemrt.engines.recipe import HeadDraft, Recipe
from tandemrt.export.read.checkpoint import read_index
from tandemrt.export.read.packaging import other_form

_WORD = r"[A-Za-z0-9][\w.-]*"
NAME = re.compile(rf"(?P<repository>{_WORD}/{_WORD}?)(?:@(?P<revision>{_WORD}(?:/{_WORD})*))?", re.ASCII)
WEIGHTS = "model*.safetensors"
FILES = ["*.json", "*.jinja", "merges.txt", WEIGHTS]
OTHERS = ["*/*.json", "*/*.txt", "*/*.safetensors"]  # the same model in other forms: original/, onnx/

Progress = Callable[[str, int, int], None]  # what, how much of it, of how much


def with_checkpoints(
    recipe: Recipe, begin: Callable[[str], None] | None = None, progress: Progress | None = None
) -> Recipe:
    """Return ``recipe`` with a folder of this machine for every checkpoint that it names.

    A folder that is there, relative to the recipe, is taken; a name of the hub, ``OWNER/NAME`` or
    ``OWNER/NAME@REVISION``, is looked up in the hub's cache (HF_HOME) and fetched if it is not whole there. ``begin``
    hears the name of what is fetched, ``progress`` megabytes. Raises BadRecipe for what is in neither place.
    """
    changed: dict[str, Any] = {}
    for role, checkpoint in recipe.checkpoints().items():
        name = None if checkpoint.is_dir() else recipe.hub_name(checkpoint)
        if name is None or (match := NAME.fullmatch(name)) is None:
            continue
        head = role == "draft" and isinstance(recipe.draft, HeadDraft)
        needed = {"config.json"} if head else {"config.json", "tokenizer.json"}
        folder = _folder(f"{role}.checkpoint", match["repository"], match["revision"], needed, begin, progress)
        changed[role] = getattr(recipe, role).model_copy(update={"checkpoint": folder})
    recipe = recipe.model_copy(update=changed)
    recipe.require_checkpoints()
    return recipe


def _folder(
    key: str,
    repository: str,
    revision: str | None,
    needed: set[str],
    begin: Callable[[str], None] | None,
    progress: Progress | None,
) -> Path:
    """The folder of the hub's cache with a checkpoint that has the files ``needed``, and its weights."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    snapshot = partial(snapshot_download, repository, revision=revision, allow_patterns=FILES, ignore_patterns=OTHERS)
    name = repository if revision is None else f"{repository}@{revision}"
    try:
        with suppress(LocalEntryNotFoundError):
            found = Path(snapshot(local_files_only=True))
            if _is_whole(found, needed):
                return found
        if begin is not None:
            begin(f"Fetch {name} from the Hugging Face hub")
        fetched = Path(snapshot(tqdm_class=_bar(progress)))
        if _is_whole(fetched, needed):
            return fetched
        names = HfApi().list_repo_files(repository, revision=revision)  # without a network the cache's folder came back
        other = None if any(fetched.glob(WEIGHTS)) else other_form(names)
    except GatedRepoError:
        why = "ask for access on its page, then log in: hf auth login"
    except RepositoryNotFoundError:
        why = "the hub has no such repository, or not for you (hf auth login)"
    except Exception as error:  # of the network, of the disk, of the hub: families without a common base
        why = clipped(error)
    else:
        if other is None:  # what is missing is said where it is read
            return fetched
        raise BadRecipe(f"{key}: a checkpoint is config.json and {WEIGHTS}; {quoted(name)} holds {other}")
    raise BadRecipe(
        f"{key}: must be an existing folder or a name of the Hugging Face hub; got {quoted(name)}, which is no folder "
        f"beside the recipe, is not whole in the hub's cache, and could not be fetched: {why}"
    )


def _is_whole(folder: Path, needed: set[str]) -> bool:
    """Whether a folder of the cache has all of a checkpoint: others fetch a repository's files one by one."""
    index = folder / "model.safetensors.index.json"
    shards = set(read_index(index).values()) if index.is_file() else {"model.safetensors"}
    return all((folder / name).is_file() for name in needed | shards)


def _bar(progress: Progress | None) -> Any:
    """A progress bar, as the hub's client wants one, that draws nothing and tells ``progress``."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    base: Any = tqdm

    class Told(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **options | {"disable": progress is None})

        def display(self, *_: Any, **__: Any) -> None:
            if progress is not None and self.unit == "B" and self.total:
                progress("MB", int(self.n / 1e6), int(self.total / 1e6))

    return Told
