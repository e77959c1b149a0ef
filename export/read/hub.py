"""Checkpoints that a recipe names as the Hugging Face hub does: from the hub's local cache, or fetched into it."""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tandemrt.engines.errors import BadRecipe, clipped, quoted
from tandemrt.engines.recipe import Recipe
from tandemrt.export.read.checkpoint import read_index

_WORD = r"[A-Za-z0-9][\w.-]*"
NAME = re.compile(rf"(?P<repository>{_WORD}/{_WORD}?)(?:@(?P<revision>{_WORD}))?", re.ASCII)
FILES = ["*.json", "*.jinja", "merges.txt", "model*.safetensors"]
OTHERS = ["*/*"]  # the same model in other forms: original/, onnx/

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
        folder = _folder(f"{role}.checkpoint", match["repository"], match["revision"], begin, progress)
        changed[role] = getattr(recipe, role).model_copy(update={"checkpoint": folder})
    recipe = recipe.model_copy(update=changed)
    recipe.require_checkpoints()
    return recipe


def _folder(
    key: str, repository: str, revision: str | None, begin: Callable[[str], None] | None, progress: Progress | None
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    snapshot = partial(snapshot_download, repository, revision=revision, allow_patterns=FILES, ignore_patterns=OTHERS)
    name = repository if revision is None else f"{repository}@{revision}"
    try:
        with suppress(LocalEntryNotFoundError):
            found = Path(snapshot(local_files_only=True))
            if _is_whole(found):
                return found
        if begin is not None:
            begin(f"Fetch {name} from the Hugging Face hub")
        return Path(snapshot(tqdm_class=_bar(progress)))
    except GatedRepoError:
        why = "ask for access on its page, then log in: hf auth login"
    except RepositoryNotFoundError:
        why = "the hub has no such repository, or not for you (hf auth login)"
    except Exception as error:  # of the network, of the disk, of the hub: families without a common base
        why = clipped(error)
    raise BadRecipe(
        f"{key}: must be an existing folder or a name of the Hugging Face hub; got {quoted(name)}, which is no folder "
        f"beside the recipe, is not whole in the hub's cache, and could not be fetched: {why}"
    )


def _is_whole(folder: Path) -> bool:
    """Whether a folder of the cache has all of a checkpoint: others fetch a repository's files one by one."""
    index = folder / "model.safetensors.index.json"
    shards = set(read_index(index).values()) if index.is_file() else {"model.safetensors"}
    return all((folder / name).is_file() for name in {"config.json", "tokenizer.json", *shards})


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
