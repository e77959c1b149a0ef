"""Find or build the bundle of a recipe, a checkpoint folder or a name on the Hugging Face hub, in the user's cache."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import VERSION
from tandemrt.engines.contract.draft_kinds import HeadKind
from tandemrt.engines.contract.dtypes import computed_in
from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.engines.options.model_name import is_recipe, require_model
from tandemrt.engines.recipe.recipe import Recipe, locate
from tandemrt.engines.text.tokenizer import read_chat_templates
from tandemrt.engines.user_cache import BUNDLES, cache_folder, write_file
from tandemrt.engines.validation.errors import BadBundle, BadRequest, quoted
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.default_recipe import Machine, default_recipe, draft_option, recipe_name
from tandemrt.export.bundle.gguf import gguf_file, kept_types, unpacked_gguf, with_unpacked_gguf
from tandemrt.export.compile.backends import DEFAULTS, CompileOptions
from tandemrt.export.quantize.gguf.checkpoint import KeptTypes
from tandemrt.export.read.converted_tokenizer import tokenizer_folder
from tandemrt.export.read.hub import fetch, resolve_checkpoints
from tandemrt.export.read.tokenizer import missing_chat_template
from tandemrt.export.staging import sole_builder, unwritable_cache

Begin = Callable[[str], None]  # receives the title of a step


def find_or_build(
    model: str,
    options: BuildOptions,
    *,
    begin: Begin,
    on_recipe: Callable[[Path], None],
    on_note: Callable[[str], None],
    compiling: CompileOptions = DEFAULTS,
    needs_chat_template: bool = False,
) -> Path:
    """Return the folder of a model's bundle, which an earlier run or this one built.

    Args:
        model: a recipe file, the name of an included recipe, a checkpoint folder or a name on the hub.
        options: choices for a checkpoint's default recipe.
        begin: receives the title of each step.
        on_recipe: receives the file of a default recipe before the build.
        on_note: receives each note of the build after it.
        compiling: callback for the progress of steps.
        needs_chat_template: raise BadRequest before the build for a model without a chat template.

    The bundle is in ``bundles`` of the user's cache folder. Its name has a digest of all that it is built from, so a
    changed checkpoint or recipe gets another one. Raises BadRequest, BadRecipe, BadCheckpoint or BackendUnavailable.
    """
    if is_recipe(model):
        if options.given():
            raise BadRequest(f"{', '.join(options.given())}: a recipe defines these; change {quoted(model)} instead")
        recipe = Recipe.load(locate(model))
        folder = _cache_place(recipe.name, recipe.digest, *map(_identity, recipe.checkpoints().values()))

        def checked_recipe() -> Recipe:
            if needs_chat_template:
                local = with_unpacked_gguf(recipe, begin, compiling.progress, needs_chat_template=True)
                local = resolve_checkpoints(local, begin, compiling.progress)
                _require_chat_template(local.target.checkpoint, model)
            return recipe

        return _cached(folder, checked_recipe, begin, on_note, compiling)
    source = CheckpointSource.find(
        model, options, begin=begin, compiling=compiling, needs_chat_template=needs_chat_template
    )

    def written_recipe() -> Recipe:
        if needs_chat_template:
            _require_chat_template(source.checkpoint, model)
        file = source.write_recipe()
        on_recipe(file)
        return Recipe.load(file)

    return _cached(source.folder, written_recipe, begin, on_note, compiling)


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint without a recipe, and what its default recipe depends on.

    ``model`` is the name that the user gave; ``checkpoint`` is the local folder.
    """

    model: str
    checkpoint: Path
    options: BuildOptions
    machine: Machine

    @classmethod
    def find(
        cls,
        model: str,
        options: BuildOptions,
        *,
        begin: Begin,
        compiling: CompileOptions = DEFAULTS,
        backend: str | None = None,
        needs_chat_template: bool = False,
    ) -> "CheckpointSource":
        """Find the checkpoint's folder, fetching a name on the hub. Raises BadRequest or BackendUnavailable.

        A GGUF file without a chat template is not unpacked if it ``needs_chat_template``.
        """
        machine = Machine.here(backend)
        compute = computed_in(options.dtype or "int8", paged=not machine.on_cpu)
        shares = draft_option(options.draft)[0] in get_args(HeadKind)
        kept = kept_types(on_cpu=machine.on_cpu, compute=compute, draft_shares=shares)
        folder = _checkpoint_folder(model, kept, begin, compiling, needs_chat_template=needs_chat_template)
        return cls(model, folder, options, machine)

    @property
    def folder(self) -> Path:
        """Place of the bundle in the user's cache folder."""
        draft = self.options.draft
        named = _identity(Path(draft.partition(":")[2] or draft)) if draft else ""
        chosen = json.dumps(self.options.given())
        return _cache_place(recipe_name(self.model), _identity(self.checkpoint), named, chosen, self.machine.backend)

    def write_recipe(self) -> Path:
        """Write the default recipe next to ``folder`` and return its file. Raises BadBundle if that is impossible."""
        local = Path(self.model)
        named = str(local.resolve()) if gguf_file(local) else str(self.checkpoint) if local.is_dir() else self.model
        text = default_recipe(self.checkpoint, recipe_name(self.model), named, self.options, self.machine)
        file = self.folder.with_name(f"{self.folder.name}.toml")
        try:
            write_file(file, text.encode())
        except OSError as error:
            raise unwritable_cache(error) from error
        return file


def _checkpoint_folder(
    model: str, kept: KeptTypes, begin: Begin, compiling: CompileOptions, *, needs_chat_template: bool
) -> Path:
    """Return the local folder of a checkpoint, for a GGUF file its copy in the cache.

    The reader of checkpoints rejects a folder in another format.
    """
    require_model(model)
    if (file := gguf_file(Path(model))) is not None:
        return unpacked_gguf(file.resolve(), kept, begin, compiling.progress, needs_chat_template=needs_chat_template)
    if Path(model).is_dir():
        return Path(model).resolve()
    return fetch(model, "bundle", begin=begin, progress=compiling.progress)


def _require_chat_template(checkpoint: Path, model: str) -> None:
    if checkpoint.is_dir() and "default" not in read_chat_templates(tokenizer_folder(checkpoint)):
        raise missing_chat_template(model)


def _cached(
    folder: Path,
    recipe: Callable[[], Recipe],
    begin: Begin,
    on_note: Callable[[str], None],
    compiling: CompileOptions,
) -> Path:
    """Return the bundle at ``folder``; build it unless an earlier run did, or another process does meanwhile."""
    if _is_usable(folder):
        return folder
    with sole_builder(folder, begin):
        if not _is_usable(folder):
            report = build(recipe(), folder, force=True, progress=begin, compiling=compiling)
            for note in report.notes:
                on_note(note)
    return folder


def _cache_place(name: str, *parts: str) -> Path:
    # A bundle of other operators does not open.
    digest = hashlib.sha256(json.dumps([VERSION, repr(SCHEMAS), *parts]).encode()).hexdigest()
    return cache_folder() / BUNDLES / f"{name}-{digest[:12]}"


def _identity(checkpoint: Path) -> str:
    """Return the names, sizes and times of a checkpoint's files; the path itself if it is no folder."""
    if not checkpoint.is_dir():
        return str(checkpoint)
    stats = [(path.name, path.stat()) for path in sorted(checkpoint.iterdir()) if path.is_file()]
    return json.dumps([str(checkpoint.resolve()), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)])


def _is_usable(folder: Path) -> bool:
    try:
        Bundle.read(folder)  # its files are compared when it opens
    except BadBundle:
        return False
    return True
