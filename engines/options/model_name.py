"""Names that are accepted in place of a bundle: a recipe, a checkpoint, or a name on the Hugging Face hub."""

import re
from contextlib import suppress
from pathlib import Path

from tandemrt.engines.bundle.manifest import FILE_NAME
from tandemrt.engines.recipe.recipe import INCLUDED
from tandemrt.engines.validation.errors import BadBundle, quoted
from tandemrt.engines.validation.records import nearest

_WORD = r"[A-Za-z0-9][\w.-]*"
CHECKPOINT_FILES = ("config.json", "*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")  # of any format
HUB_NAME = re.compile(rf"{_WORD}/{_WORD}?(?:@{_WORD}(?:/{_WORD})*)?", re.ASCII)  # OWNER/NAME or OWNER/NAME@REVISION


def is_recipe(model: str) -> bool:
    """Return whether ``model`` names a recipe file or an included recipe."""
    with suppress(OSError, ValueError):  # the path is too long or has a zero byte
        return (Path(model).is_file() and not _is_gguf(Path(model))) or (INCLUDED / f"{model}.toml").is_file()
    return False


def require_model(model: str) -> None:
    """Raise BadBundle unless ``model`` is a recipe, a checkpoint, or written like a name on the hub.

    A checkpoint is a folder, or a GGUF file.
    """
    names = [file.stem for file in sorted(INCLUDED.glob("*.toml"), key=lambda file: file.stem)]
    with suppress(OSError, RuntimeError, ValueError):  # too long, a cycle of links, a zero byte
        path = Path(model)
        if is_recipe(model) or (path.is_file() and _is_gguf(path)):
            return
        if path.is_dir():
            if any(any(path.glob(pattern)) for pattern in CHECKPOINT_FILES):
                return
            raise BadBundle(
                f"model: a bundle's folder has {FILE_NAME}, a checkpoint's folder has config.json; {quoted(model)} has "
                "neither. Name another folder"
            )
        if HUB_NAME.fullmatch(model):
            return
    if "/" in model or Path(model).suffix in (".gguf", ".toml"):
        raise BadBundle(f"model: {quoted(model)} does not exist. Correct the path{nearest(model, names)}")
    raise BadBundle(
        f"model: must be a path, the name of an included recipe, or OWNER/NAME on the Hugging Face hub; got "
        f"{quoted(model)}{nearest(model, names)}. Included recipes: {', '.join(names)}"
    )


def _is_gguf(file: Path) -> bool:
    return file.suffix == ".gguf"
