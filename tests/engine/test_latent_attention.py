"""Latent attention with float8 weights, which the graph dequantizes per head, and with an index over keys."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tests.engine.decoding import VOCAB, Decoder, edit_config, expected_logits, make_checkpoint, randomize
from tests.engine.quantized import float8
from tests.families.cases import FAMILIES

WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}
TEXT = [(7 * at) % VOCAB for at in range(30)]


def write_float8(folder: Path) -> PreTrainedModel:
    """Write a tiny DeepSeek-V3 with weights in float8; matmul inputs are not rounded.

    Returns the model with the dequantized weights.
    """
    model = make_checkpoint("deepseek_v3", folder)
    tensors = load_file(folder / "model.safetensors")
    dequantized = dict(tensors)
    for name in [name for name in tensors if "proj" in name]:
        tensors[name], tensors[f"{name}_scale"], dequantized[name] = float8(tensors[name], (1, 0))
    (folder / "values").mkdir()
    (folder / "values" / "config.json").write_text((folder / "config.json").read_text())
    save_file(dequantized, folder / "values" / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config=FP8)
    return type(model).from_pretrained(folder / "values", attn_implementation="eager").eval()


def test_float8_weights_are_dequantized(tmp_path: Path) -> None:
    expected = expected_logits(write_float8(tmp_path), TEXT)
    logits = Decoder(tmp_path, "grouped", batch=1)([TEXT], [0])[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_float8_weights_have_the_same_bits_in_any_draft_window(tmp_path: Path) -> None:
    write_float8(tmp_path)
    decode = Decoder(tmp_path, "grouped", batch=1)
    alone = [decode([[token]], [at])[0, 0] for at, token in enumerate(TEXT[:10])]
    together = Decoder(tmp_path, "grouped", batch=1)([TEXT[:10]], [0])[0]
    for one, other in zip(alone, together, strict=True):
        assert one.equal(other)


def test_texts_within_the_index_of_glm_5_equal_transformers(tmp_path: Path) -> None:
    sizes = {"index_topk": len(TEXT), "index_head_dim": 64, "index_n_heads": 2, "first_k_dense_replace": 1}
    config = FAMILIES["glm4_moe_lite"]().to_dict() | sizes | {"model_type": "glm_moe_dsa", "mlp_layer_types": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    assert any(".indexer." in name for name in load_file(tmp_path / "model.safetensors"))
    assert ModelSpec.from_hf(Checkpoint.open(tmp_path).config).max_length == len(TEXT)
    logits = Decoder(tmp_path, "grouped", batch=1)([TEXT], [0])[0]
    torch.testing.assert_close(logits, expected_logits(model, TEXT), atol=1e-4, rtol=0)
