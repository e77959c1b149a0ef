"""Recognize folders with a model in another format than safetensors, and say how to convert it."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from tandemrt.engines.validation.errors import BadCheckpoint

# (patterns of file names, description of the format, advice). The first row with a match applies.
_OTHER_FORMATS = (
    (
        ("adapter_config.json", "adapter_model.*"),
        "a LoRA adapter, which is not a complete model",
        "merge it into its base model and save that: peft's merge_and_unload(), then save_pretrained()",
    ),
    (
        ("*.gguf",),
        "GGUF, the format of llama.cpp",
        "name one file of a family that is read (docs/models.md), without config.json next to it, or take the original "
        "checkpoint",
    ),
    (
        ("consolidated*.safetensors", "consolidated*.pth", "params.json"),
        "the original format of the model's authors (consolidated)",
        "take the repository's files in transformers' format: config.json and model*.safetensors",
    ),
    (
        ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth"),
        "weights as PyTorch pickles",
        "convert it: transformers' from_pretrained(folder), then save_pretrained(), which writes safetensors; a draft "
        "head, which transformers would take for another model: safetensors.torch.save_file(torch.load(file, "
        "weights_only=True), 'model.safetensors')",
    ),
)


def require_safetensors(folder: Path) -> None:
    """Raise BadCheckpoint if ``folder`` holds a model in another format than config.json and model*.safetensors."""
    if (folder / "config.json").is_file() and any(folder.glob("model*.safetensors*")):
        return
    rule = f"{folder}: a checkpoint is config.json and model*.safetensors, this folder holds"
    if (folder / "snapshots").is_dir() and (folder / "refs").is_dir():
        raise BadCheckpoint(
            f"{rule} a repository as the Hugging Face hub's cache keeps it; name it as the hub does (OWNER/NAME), or "
            "name the folder in its snapshots"
        )
    if other := other_format(path.name for path in folder.iterdir()):
        raise BadCheckpoint(f"{rule} {other}")


def other_format(names: Iterable[str]) -> str | None:
    """Return the other model format that files of these ``names`` have, with advice; None: no known format."""
    there = sorted(names)
    for patterns, what, advice in _OTHER_FORMATS:
        matching = [name for pattern in patterns for name in there if fnmatchcase(name, pattern)]
        if matching:
            return f"{what} ({matching[0]}); {advice}"
    return None
