"""The bundle of a model that is not a bundle yet: a recipe, a checkpoint or a name on the Hugging Face hub."""

from contextlib import suppress
from pathlib import Path

from tandemrt.engines.bundle.manifest import FILE_NAME
from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.engines.validation.errors import BadBundle, BadRequest, quoted
from tandemrt.engines.validation.extras import pip_install


def bundle_folder(model: str | Path, options: BuildOptions, *, needs_chat_template: bool = False) -> Path:
    """Return the folder of a bundle. A model that is not one is built into the user's cache folder, once.

    This is the only place where the runtime uses the exporter; bundles run without it. Raises BadBundle, BadRequest,
    BadRecipe or BadCheckpoint; before a build also for a model without the chat template that the caller needs.
    """
    is_bundle = False
    with suppress(OSError, ValueError):  # the path is too long or has a zero byte
        is_bundle = (Path(model) / FILE_NAME).exists()
    if is_bundle:
        if changed := options.chosen():
            raise BadRequest(f"{', '.join(changed)}: {quoted(str(model))} is built already; build it anew to change")
        return Path(model)
    from tandemrt.engines.options.model_name import require_model  # takes long to import, and no bundle needs it

    require_model(str(model))
    try:
        from tandemrt.export.cli.console_build import find_or_build
    except ModuleNotFoundError as error:
        raise BadBundle(
            f"bundle must be a folder with {FILE_NAME}; got {quoted(str(model))}, and the exporter, which would build "
            f"it, needs {error.name}: {pip_install('build')}"
        ) from error
    return find_or_build(str(model), options, needs_chat_template=needs_chat_template)
