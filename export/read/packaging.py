"""Folders that hold a model in another form than a checkpoint of safetensors: say which, and what to do."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from tandemrt.engines.errors import BadCheckpoint

# Patterns of files, what they are, what to do. The first that is there is what a folder without safetensors holds.
_OTHERS = (
    (
        ("adapter_config.json", "adapter_model.*"),
        "a LoRA adapter, which is no model of its own",
        "merge it into its base model and save that: peft's merge_and_unload(), then save_pretrained()",
    ),
    (
        ("*.gguf",),
        "GGUF, the form of llama.cpp",
        "take the original checkpoint, or convert it: transformers' from_pretrained(folder, gguf_file=...), then "
        "save_pretrained()",
    ),
    (
        ("consolidated*.safetensors", "consolidated*.pth", "params.json"),
        "the original form of its makers (consolidated)",
        "take the repository's files in transformers' form: config.json and model*.safetensors",
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
    """Raise BadCheckpoint if ``folder`` holds a model, but not as config.json and model*.safetensors."""
    if (folder / "config.json").is_file() and any(folder.glob("model*.safetensors*")):
        return
    rule = f"{folder}: a checkpoint is config.json and model*.safetensors, this folder holds"
    if (folder / "snapshots").is_dir() and (folder / "refs").is_dir():
        raise BadCheckpoint(
            f"{rule} a repository as the Hugging Face hub's cache keeps it; name it as the hub does (OWNER/NAME), or "
            "name the folder in its snapshots"
        )
    if other := other_form(path.name for path in folder.iterdir()):
        raise BadCheckpoint(f"{rule} {other}")


def other_form(names: Iterable[str]) -> str | None:
    """What files of these ``names`` hold that are no checkpoint, and what to do; None: nothing that is known."""
    there = sorted(names)
    for patterns, what, advice in _OTHERS:
        found = [name for pattern in patterns for name in there if fnmatchcase(name, pattern)]
        if found:
            return f"{what} ({found[0]}); {advice}"
    return None
