"""Find or build a model's bundle, with the recipe, the steps and the notes on standard error."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.export.bundle.sources import find_source, is_usable
from tandemrt.export.cli.progress import ConsoleListener


def find_or_build(model: str, options: BuildOptions, *, needs_chat_template: bool = False) -> Path:
    """Return the folder of a model's bundle, which an earlier run or this one built.

    Args:
        model: a recipe file, the name of an included recipe, a checkpoint folder, a GGUF file or a name on the hub.
        options: choices for a checkpoint's default recipe.
        needs_chat_template: raise BadRequest before the build for a model without a chat template.

    The bundle is in ``bundles`` of the user's cache folder. Its name has a digest of all that it is built from, so a
    changed checkpoint or recipe gets another one. Raises BadRequest, BadRecipe, BadCheckpoint or BackendUnavailable.
    """
    console = Console(stderr=True, soft_wrap=True)
    with ConsoleListener(console) as listener:
        source = find_source(model, options, listener)
        folder = source.folder
        if not is_usable(folder):
            from tandemrt.export.bundle.cached_build import build_into_cache  # imports take longer than an opening

            for note in build_into_cache(source, folder, listener, needs_chat_template=needs_chat_template):
                console.print(escape(note), highlight=False)
    return folder
