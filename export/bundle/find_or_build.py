"""Find or build the bundle of a recipe, a checkpoint or a name on the Hugging Face hub, in the user's cache."""

from collections.abc import Callable
from pathlib import Path

from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.export.bundle.sources import find_source, is_usable
from tandemrt.export.quantize.writer import Progress


def find_or_build(
    model: str,
    options: BuildOptions,
    *,
    begin: Callable[[str], None],
    on_recipe: Callable[[Path], None],
    on_note: Callable[[str], None],
    progress: Progress | None = None,
    needs_chat_template: bool = False,
) -> Path:
    """Return the folder of a model's bundle, which an earlier run or this one built.

    Args:
        model: a recipe file, the name of an included recipe, a checkpoint folder, a GGUF file or a name on the hub.
        options: choices for a checkpoint's default recipe.
        begin: receives the title of each step.
        on_recipe: receives the file of a default recipe before the build.
        on_note: receives each note of the build after it.
        progress: receives the progress within a step.
        needs_chat_template: raise BadRequest before the build for a model without a chat template.

    The bundle is in ``bundles`` of the user's cache folder. Its name has a digest of all that it is built from, so a
    changed checkpoint or recipe gets another one. Raises BadRequest, BadRecipe, BadCheckpoint or BackendUnavailable.
    """
    source = find_source(model, options, begin=begin, progress=progress)
    folder = source.folder
    if is_usable(folder):
        return folder
    from tandemrt.export.bundle.cached_build import build_into_cache  # its imports take longer than opening a bundle

    notes = build_into_cache(source, folder, begin, on_recipe, progress, needs_chat_template=needs_chat_template)
    for note in notes:
        on_note(note)
    return folder
