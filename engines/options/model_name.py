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
    with suppress(OSError, RuntimeError, ValueError):
        folder = Path(model)
        is_checkpoint = folder.is_dir() and any(any(folder.glob(pattern)) for pattern in CHECKPOINT_FILES)
        if (
            is_recipe(model)
            or is_checkpoint
            or (folder.is_file() and _is_gguf(folder))
            or (not folder.exists() and HUB_NAME.fullmatch(model))
        ):
            return
    hint = nearest(model, [file.stem for file in INCLUDED.glob("*.toml")])
    raise BadBundle(
        f"bundle must be a folder with {FILE_NAME}, a recipe, a checkpoint's folder, a GGUF file, or OWNER/NAME on the "
        f"Hugging Face hub; got {quoted(model)}{hint}"
    )


def _is_gguf(file: Path) -> bool:
    return file.suffix == ".gguf"
