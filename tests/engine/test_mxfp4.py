"""The published format of gpt-oss: experts in MXFP4, compared with transformers."""

import json
import math
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.quantize.checkpoint import write_quantized
from tandemrt.export.quantize.dequantized_checkpoint import write_dequantized
from tandemrt.export.quantize.stored_weights import read_low_bit
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import with_graph_names
from tests.engine import quantized
from tests.engine.decoding import VOCAB, Decoder, edit_config, expected_logits, make_checkpoint, open_steps
from tests.makers import VOCAB as WIDE
from tests.makers import tiny_tokenizer, write_recipe

SIZES = {"hidden_size": 64, "intermediate_size": 32}
PUBLISHED: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
EXPERTS = "model.layers.1.mlp.experts"
TOKENS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def published(folder: Path, *, unquantized: int | None = None, sizes: Mapping[str, int] = MappingProxyType({})) -> None:
    """Write a checkpoint with random 4-bit floats as experts, with scales near those that keep a row's norm.

    The experts of layer ``unquantized`` stay unquantized.
    """
    make_checkpoint("gpt_oss", folder, sizes={**SIZES, **sizes})
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(2)
    left = [f"model.layers.{unquantized}.mlp.experts"]
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        if name.startswith(left[0]):
            continue
        count, inner, rows = tensors.pop(name).shape
        exponent = 127 - round(math.log2(3 * inner**0.5))
        shape = (count, rows, inner // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        spread = torch.randint(-2, 2, shape, generator=generator)
        tensors[f"{name}_scales"] = (exponent + spread).to(torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_config(
        folder, quantization_config=PUBLISHED | {"modules_to_not_convert": PUBLISHED["modules_to_not_convert"] + left}
    )


def test_mxfp4_is_rejected_on_a_gpu_with_a_cache_that_supports_it(tmp_path: Path) -> None:
    published(tiny_tokenizer(tmp_path), sizes={"head_dim": 64, "vocab_size": WIDE})
    backend = 'name = "onnxruntime-cuda"\ncache = "linear"'
    recipe = Recipe.load(write_recipe(tmp_path / "r.toml", target=tmp_path, dtype="bfloat16", backend=backend))
    message = "gpt_oss has experts and attention sinks, which run with onnxruntime-cuda over a paged cache, or on a CPU"
    with pytest.raises(BadCheckpoint, match=message):
        open_models(recipe)


def test_mxfp4_over_a_paged_cache_keeps_its_values(tmp_path: Path) -> None:
    published(tmp_path)
    expected = expected_logits(read_by_transformers(tmp_path), TOKENS)
    quantized.packed(tmp_path, "float32")
    out = tmp_path / "packed"
    steps = Decoder(out, "paged", 1, open_engine=partial(open_steps, folder=out))
    for decode in (Decoder(out, "paged", batch=1), steps):
        torch.testing.assert_close(decode([TOKENS], [0])[0], expected, rtol=1e-3, atol=1e-4)


def read_by_transformers(folder: Path) -> PreTrainedModel:
    how = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def test_experts_have_the_values_of_transformers_before_and_after_repacking(tmp_path: Path) -> None:
    published(tmp_path)
    model, checkpoint = read_by_transformers(tmp_path), Checkpoint.open(tmp_path)
    tensors = with_graph_names(checkpoint, ModelSpec.from_hf(checkpoint.config)).tensors
    quantization = read_quantization(checkpoint.config, tmp_path)
    for kind in ("gate_up_proj", "down_proj"):
        theirs = model.get_parameter(f"{EXPERTS}.{kind}").detach()
        for expert in (0, 5):
            module = f"{EXPERTS}.{expert}.{kind}"
            result = read_low_bit(module, tensors, quantization.scheme(module)).dequantized
            assert torch.equal(torch.from_numpy(result), theirs[expert].T)

    expected = expected_logits(model, TOKENS)
    quantized.packed(tmp_path)
    result = Decoder(tmp_path / "packed", "grouped", batch=1)([TOKENS], [0])[0]
    assert (result - expected).norm() < 0.02 * expected.norm()  # inputs are rounded to 8 bits


def test_dequantized_experts_equal_those_of_transformers(tmp_path: Path) -> None:
    published(tmp_path)
    expected = expected_logits(read_by_transformers(tmp_path), TOKENS)
    checkpoint, out = Checkpoint.open(tmp_path), tmp_path / "plain"
    out.mkdir()
    quantization = read_quantization(checkpoint.config, tmp_path)
    assert quantization
    written = write_dequantized(checkpoint, ModelSpec.from_hf(checkpoint.config), quantization, out, "float32")
    (out / "config.json").write_text(json.dumps(dict(written.checkpoint.config)))
    logits = Decoder(out, "grouped", batch=1)([TOKENS], [0])[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_ignored_experts_stay_unquantized(tmp_path: Path) -> None:
    published(tmp_path, unquantized=0)
    expected = expected_logits(read_by_transformers(tmp_path), TOKENS)
    quantized.packed(tmp_path)
    logits = Decoder(tmp_path / "packed", "grouped", batch=1)([TOKENS], [0])[0]
    assert (logits - expected).norm() < 0.02 * expected.norm()


def test_a_token_has_the_same_bits_in_any_window_for_all_dtypes(tmp_path: Path) -> None:
    published(tmp_path)
    checkpoint, out = Checkpoint.open(tmp_path), tmp_path / "int4"
    out.mkdir()
    shutil.copy(tmp_path / "config.json", out)
    write_quantized(checkpoint, ModelSpec.from_hf(checkpoint.config), out, 4)

    def scored(batch: int, window: int) -> torch.Tensor:  # not to the end of the cache: attention may pad to two rows
        decode, texts = Decoder(out, "grouped", batch=batch), [TOKENS, TOKENS[::-1]][:batch]
        return torch.cat(
            [decode([text[at : at + window] for text in texts], [at] * batch) for at in range(0, 35, window)], dim=1
        )[0]

    assert torch.equal(scored(batch=2, window=5), scored(batch=1, window=1))


def edited(folder: Path, name: str, tensor: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {f"{EXPERTS}.{name}": tensor}, file)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("down_proj_scales", torch.full((6, 64, 1), 255, dtype=torch.uint8), "exponents below 255.*holds 64 values of"),
        ("down_proj_scales", torch.ones(6, 64, 1), r"should be uint8\[64, 1\].*it is float32\[64, 1\]"),
        (
            "down_proj_blocks",
            torch.zeros(6, 64, 1, 8, dtype=torch.uint8),
            r"should be uint8\[64, 1, 16\].*\[64, 1, 8\]",
        ),
        ("down_proj_blocks", torch.zeros(6, 64, dtype=torch.uint8), r"should be uint8\[64, 0, 16\].*uint8\[64\]"),
    ],
)
def test_mxfp4_tensors_that_do_not_fit_are_rejected(
    tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    published(tmp_path)
    edited(tmp_path, name, tensor)
    with pytest.raises(BadCheckpoint, match=rf"{EXPERTS}\.0\.{name.replace('proj_', 'proj.')}.*{message}"):
        quantized.packed(tmp_path)


def test_unpacked_mxfp4_weights_are_rejected(tmp_path: Path) -> None:
    published(tmp_path)
    with pytest.raises(BadCheckpoint, match=r"4-bit weights run on backend onnxruntime-cpu only"):
        Decoder(tmp_path, "grouped", batch=1)
