"""Checkpoints quantized in the ways of others, and what they mean by definition: weights as numbers, rounded inputs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tandemrt.export.quantize.checkpoint import write_quantized
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tests.engine.decoding import edit_config, make_checkpoint

FP8 = torch.float8_e4m3fn
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "max_position_embeddings": 128}
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of its eight that the i-th integer of a word holds

Stored = dict[str, torch.Tensor]
# Of the weight of a product: what is stored, by the last part of a tensor's name, and what that stands for.
Narrow = Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]


def float8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weight in float8_e4m3fn, a scale per block (0: the whole dimension), and what they stand for."""
    rows, inner = weight.shape
    tall, wide = (size or full for size, full in zip(block, weight.shape, strict=True))
    counts = -(-rows // tall), -(-inner // wide)
    padded = torch.zeros(counts[0] * tall, counts[1] * wide)
    padded[:rows, :inner] = weight
    scale = padded.view(counts[0], tall, counts[1], wide).abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :inner]
    narrow = (weight / spread).to(FP8)
    return narrow, scale, narrow.float() * spread


def rounded(x: torch.Tensor, scale: float | None, block: int) -> torch.Tensor:
    """Inputs in float8_e4m3fn, with a static scale, else with one per token and ``block`` values (0: all)."""
    if scale is not None:
        return (x / scale).clamp(-448, 448).to(FP8).float() * scale
    blocks = x.unflatten(-1, (-1, block or x.shape[-1]))
    scales = blocks.abs().amax(-1, keepdim=True) / 448
    return ((blocks / scales).to(FP8).float() * scales).flatten(-2)


def int4(weight: torch.Tensor, group: int, zeros: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers 0 to 15 [rows, inner], scales and zero points [rows, groups] of a weight."""
    blocks = weight.unflatten(1, (-1, group))
    if not zeros:
        scale = blocks.abs().amax(-1) / 7
        zero = torch.full_like(scale, 8)
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = (high - low) / 15
        zero = (-low / scale).round()
    scale = scale.half().float()
    integers = (blocks / scale[..., None]).round().add(zero[..., None]).clamp(0, 15)
    return integers.flatten(1).int(), scale, zero.int()


def words(integers: torch.Tensor) -> torch.Tensor:
    """int32 [rows, columns / 8]: eight integers of a row, the first in the lowest bits."""
    shifted = integers.long().unflatten(1, (-1, 8)) << (4 * torch.arange(8))
    return shifted.sum(-1).to(torch.int32)  # the highest bit becomes the sign


def pack(layout: str, integers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, *, zeros: bool) -> Stored:
    """What each way of 4 bits stores of a weight."""
    rows, inner = integers.shape
    if layout == "compressed-tensors":
        stored = {"weight_packed": words(integers), "weight_scale": scale.half()}
        stored["weight_shape"] = torch.tensor([rows, inner])
        return stored | ({"weight_zero_point": words(zero.T).T.contiguous()} if zeros else {})
    if layout == "awq":
        order = torch.arange(rows).view(-1, 8)[:, _AWQ].flatten()
        return {
            "qweight": words(integers.T[:, order]),
            "qzeros": words(zero.T[:, order]),
            "scales": scale.half().T.contiguous(),
        }
    return {
        "qweight": words(integers).T.contiguous(),
        "qzeros": words((zero.T - int(layout == "gptq")) & 15),
        "scales": scale.half().T.contiguous(),
        "g_idx": torch.arange(inner, dtype=torch.int32) // (inner // scale.shape[1]),
    }


def write(
    folder: Path,
    config: Mapping[str, Any],
    narrow: Narrow,
    inputs: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> PreTrainedModel:
    """Write a checkpoint whose products ``narrow`` stores, and return the model that computes what it means."""
    model = make_checkpoint("qwen2", folder, sizes=SIZES)
    with torch.no_grad():
        for name, meant in rewrite(folder, config, narrow).items():
            product = model.get_submodule(name)
            product.weight.copy_(meant)
            if inputs is not None:
                product.register_forward_pre_hook(lambda _, given: (inputs(given[0]),))
    return model


def rewrite(folder: Path, config: Mapping[str, Any], narrow: Narrow, *, head: bool = False) -> Stored:
    """Store the products of the checkpoint in ``folder`` as ``narrow`` says; return what their weights are then.

    ``head``: that of the logits too.
    """
    tensors, meant = load_file(folder / "model.safetensors"), {}
    ends = ("_proj.weight", "lm_head.weight") if head else "_proj.weight"
    for name in [name.removesuffix(".weight") for name in tensors if name.endswith(ends)]:
        stored, meant[name] = narrow(tensors.pop(f"{name}.weight"))
        tensors |= {f"{name}.{kind}": tensor.contiguous() for kind, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=dict(config))
    return meant


def packed(folder: Path, tiles: str | None = None, bits: int | None = None) -> Checkpoint:
    """The checkpoint as a build packs it, in a folder of its own; ``tiles``: for a GPU (blocks.Form).

    ``bits``: what weights that are whole are rounded to.
    """
    checkpoint = Checkpoint.open(folder)
    out = folder / "packed"
    out.mkdir()
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    return write_quantized(checkpoint, ModelSpec.from_hf(checkpoint.config), out, bits, tiles=tiles).checkpoint
