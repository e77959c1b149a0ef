"""Build the bundle of a recipe or of a checkpoint without one into the user's cache."""

from pathlib import Path

from tandemrt.engines.options.build_listener import BuildListener
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.text.tokenizer import read_chat_templates
from tandemrt.engines.user_cache import write_file
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.default_recipe import default_recipe
from tandemrt.export.bundle.gguf import GgufCheckpoint, with_unpacked_gguf
from tandemrt.export.bundle.sources import CheckpointSource, RecipeSource, is_usable, recipe_name
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.converted_tokenizer import tokenizer_folder
from tandemrt.export.read.hub import resolve_checkpoints
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tokenizer import missing_chat_template
from tandemrt.export.staging import sole_builder, unwritable_cache


def build_into_cache(
    source: RecipeSource | CheckpointSource, folder: Path, listener: BuildListener, *, needs_chat_template: bool
) -> tuple[str, ...]:
    """Build the bundle of ``source`` at ``folder``, unless another process does meanwhile. Return the build's notes.

    ``needs_chat_template``: raise BadRequest before the build for a model without a chat template. Raises as ``build``
    and ``write_default_recipe`` do, too.
    """
    with sole_builder(folder, listener.begin):
        if is_usable(folder):
            return ()
        if isinstance(source, RecipeSource):
            recipe = source.recipe
            if needs_chat_template:
                local = with_unpacked_gguf(recipe, listener, needs_chat_template=True)
                target = resolve_checkpoints(local, listener).target
                # An architecture that is not exported is reported first: no chat template or tokenizer would help.
                ModelSpec.from_hf(Checkpoint.open(target.checkpoint).config, ignored=target.ignore_config_fields)
                _require_chat_template(target.checkpoint, source.model)
        else:
            recipe = Recipe.load(write_default_recipe(source, listener, needs_chat_template=needs_chat_template))
        return build(recipe, folder, force=True, listener=listener).notes


def write_default_recipe(
    source: CheckpointSource, listener: BuildListener, *, needs_chat_template: bool = False
) -> Path:
    """Write the default recipe next to the place of the bundle, and return its file, which ``listener`` receives too.

    A GGUF file is unpacked for it. Raises BadRequest before that if the model has no chat template and it
    ``needs_chat_template``, as ``default_recipe`` does, and BadBundle for a cache that cannot be written.
    """
    checkpoint, name = source.checkpoint, source.model
    if isinstance(checkpoint, GgufCheckpoint):
        name = str(Path(source.model).resolve())
        checkpoint = checkpoint.unpacked(listener, needs_chat_template=needs_chat_template)
    elif Path(source.model).is_dir():
        name = str(checkpoint)
    text = default_recipe(checkpoint, recipe_name(source.model), name, source.options, source.machine)
    if needs_chat_template:
        _require_chat_template(checkpoint, source.model)
    file = source.folder.with_name(f"{source.folder.name}.toml")
    try:
        write_file(file, text.encode())
    except OSError as error:
        raise unwritable_cache(error) from error
    listener.recipe(file)
    return file


def _require_chat_template(checkpoint: Path, model: str) -> None:
    if checkpoint.is_dir() and "default" not in read_chat_templates(tokenizer_folder(checkpoint)):
        raise missing_chat_template(model)
