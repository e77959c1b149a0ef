"""Models in another format than safetensors are rejected with the name of the format and advice."""

import pytest

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.checkpoint import Checkpoint


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], r"PyTorch pickles \(pytorch_model.bin\); convert it.*save_file"),
        (["config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "PyTorch pickles"),
        (["model-Q4_K_M.gguf"], r"GGUF.*\(model-Q4_K_M.gguf\).*name one file of a family"),
        (["config.json", "model.gguf"], "GGUF"),
        (["consolidated.safetensors", "params.json", "tekken.json"], r"original format.*\(consolidated.safetensors\)"),
        (["consolidated.00.pth", "params.json"], r"original format.*\(consolidated.00.pth\)"),
        (["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"], "LoRA adapter.*merge_and_unload"),
        (["config.json"], "model.safetensors is missing"),
        (["model.safetensors"], "config.json is missing"),
    ],
)
def test_another_model_format_is_named_with_advice(tmp_path, files, message):
    """D8."""
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(BadCheckpoint, match=message):
        Checkpoint.open(tmp_path)
