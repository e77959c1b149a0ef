"""A recipe or a checkpoint that a bundle is built from, and the bundle's place in the user's cache.

This module and what it imports need no library that builds, so that a bundle that exists opens at once.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import VERSION
from tandemrt.engines.contract.draft_kinds import HeadKind
from tandemrt.engines.contract.dtypes import computed_in
from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.engines.options.build_listener import BuildListener
from tandemrt.engines.options.build_options import BuildOptions, draft_option
from tandemrt.engines.options.model_name import is_recipe, require_model
from tandemrt.engines.recipe.recipe import Recipe, locate
from tandemrt.engines.user_cache import BUNDLES, cache_folder
from tandemrt.engines.validation.errors import BadBundle, BadRequest, quoted
from tandemrt.export.bundle.gguf import GgufCheckpoint, gguf_checkpoints, gguf_file, kept_types
from tandemrt.export.bundle.machine import Machine
from tandemrt.export.read.hub import fetch


@dataclass(frozen=True)
class RecipeSource:
    """A recipe. ``model`` is its name or file as the user gave it."""

    model: str
    recipe: Recipe

    @property
    def folder(self) -> Path:
        """Place of the bundle in the user's cache folder."""
        files = gguf_checkpoints(self.recipe)
        checkpoints = {role: files.get(role, folder) for role, folder in self.recipe.checkpoints().items()}
        return _cache_place(self.recipe.name, self.recipe.digest, *map(_identity, checkpoints.values()))


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint without a recipe, and what its default recipe depends on.

    ``model`` is the name that the user gave; ``checkpoint`` is the local folder or the GGUF file.
    """

    model: str
    checkpoint: Path | GgufCheckpoint
    options: BuildOptions
    machine: Machine

    @classmethod
    def find(
        cls, model: str, options: BuildOptions, listener: BuildListener, *, backend: str | None = None
    ) -> "CheckpointSource":
        """Find the checkpoint, fetching a name on the hub.

        Raises BadBundle, BadRecipe, BadRequest or BackendUnavailable.
        """
        require_model(model)
        machine, path = Machine.here(backend), Path(model)
        checkpoint = _local(path, options, machine)
        if checkpoint is None:
            checkpoint = fetch(model, "model", listener)
        return cls(model, checkpoint, options, machine)

    @property
    def folder(self) -> Path:
        """Place of the bundle in the user's cache folder."""
        _, draft = draft_option(self.options.draft)
        local = None if draft is None else _local(Path(draft), self.options, self.machine)
        draft_identity = draft or "" if local is None else _identity(local)
        chosen = json.dumps(self.options.chosen())
        parts = (_identity(self.checkpoint), draft_identity, chosen, self.machine.backend)
        return _cache_place(recipe_name(self.model), *parts)


def find_source(model: str, options: BuildOptions, listener: BuildListener) -> RecipeSource | CheckpointSource:
    """Return what the bundle of ``model`` is built from. Raises as ``CheckpointSource.find`` does."""
    if not is_recipe(model):
        return CheckpointSource.find(model, options, listener)
    if options.chosen():
        raise BadRequest(f"{', '.join(options.chosen())}: a recipe defines these; change {quoted(model)} instead")
    return RecipeSource(model, Recipe.load(locate(model)))


def recipe_name(checkpoint: str) -> str:
    """Return a bundle's name for a checkpoint: the last part of its path or hub name, in lower case."""
    last = checkpoint.split("@")[0].rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("._-").lower() or "model"


def is_usable(folder: Path) -> bool:
    """Return whether an earlier run built a bundle at ``folder``."""
    try:
        Bundle.read(folder)  # its files are compared when it opens
    except BadBundle:
        return False
    return True


def _local(checkpoint: Path, options: BuildOptions, machine: Machine) -> Path | GgufCheckpoint | None:
    """Return a checkpoint's folder, whose format its reader checks, or its GGUF file; None if it is not here."""
    if (file := gguf_file(checkpoint)) is not None:
        compute = computed_in(options.dtype or "int8", paged=not machine.on_cpu)
        shares = draft_option(options.draft)[0] in get_args(HeadKind)
        on_cpu = machine.on_cpu
        kept = kept_types(on_cpu=on_cpu, paged=not on_cpu, compute=compute, draft_shares=shares)
        return GgufCheckpoint(file.resolve(), kept)
    return checkpoint.resolve() if checkpoint.is_dir() else None


def _cache_place(name: str, *parts: str) -> Path:
    # A bundle of other operators does not open.
    digest = hashlib.sha256(json.dumps([VERSION, repr(SCHEMAS), *parts]).encode()).hexdigest()
    return cache_folder() / BUNDLES / f"{name}-{digest[:12]}"


def _identity(checkpoint: Path | GgufCheckpoint) -> str:
    """Return the names, sizes and times of a checkpoint's files; the path itself if it is no folder."""
    if isinstance(checkpoint, GgufCheckpoint):
        return str(checkpoint.folder)
    if not checkpoint.is_dir():
        return str(checkpoint)
    stats = [(path.name, path.stat()) for path in sorted(checkpoint.iterdir()) if path.is_file()]
    return json.dumps([str(checkpoint.resolve()), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)])
