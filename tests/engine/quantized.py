"""Write checkpoints in the quantized formats of other libraries, with the weights and inputs that they define."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tandemrt import LLM, SamplingParams
from tandemrt.export.quantize.checkpoint import write_quantized
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tests.engine.decoding import edit_config, make_checkpoint
from tests.makers import tiny_checkpoint

FP8 = torch.float8_e4m3fn
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "max_position_embeddings": 128}
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of eight, that the i-th integer of a word holds

Stored = dict[str, torch.Tensor]
# Matmul weight -> stored tensors by the last part of their names, and the dequantized weight.
Quantizer = Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]


def float8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the float8_e4m3fn weight, one scale per block (0: the complete dimension), and the dequantized weight."""
    rows, inner = weight.shape
    tall, wide = (size or full for size, full in zip(block, weight.shape, strict=True))
    counts = -(-rows // tall), -(-inner // wide)
    padded = torch.zeros(counts[0] * tall, counts[1] * wide)
    padded[:rows, :inner] = weight
    scale = padded.view(counts[0], tall, counts[1], wide).abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :inner]
    quantized = (weight / spread).to(FP8)
    return quantized, scale, quantized.float() * spread


def rounded(x: torch.Tensor, scale: float | None, block: int) -> torch.Tensor:
    """Round inputs to float8_e4m3fn with a static scale, else one scale per token and ``block`` values (0: all)."""
    if scale is not None:
        return (x / scale).clamp(-448, 448).to(FP8).float() * scale
    blocks = x.unflatten(-1, (-1, block or x.shape[-1]))
    scales = blocks.abs().amax(-1, keepdim=True) / 448
    return ((blocks / scales).to(FP8).float() * scales).flatten(-2)


def integers(
    weight: torch.Tensor, group: int, zeros: bool, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize a weight: return unsigned integers [rows, inner], scales and zero points [rows, groups]."""
    blocks, most = weight.unflatten(1, (-1, group)), (1 << bits) - 1
    if not zeros:
        scale = blocks.abs().amax(-1) / (most // 2)
        zero = torch.full_like(scale, most // 2 + 1)
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = (high - low) / most
        zero = (-low / scale).round()
    scale = scale.half().float()
    rounded = (blocks / scale[..., None]).round().add(zero[..., None]).clamp(0, most)
    return rounded.flatten(1).int(), scale, zero.int()


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers of ``bits`` of a row into int32, the first in the lowest bits."""
    shifted = values.long().unflatten(1, (-1, 32 // bits)) << (bits * torch.arange(32 // bits))
    return shifted.sum(-1).to(torch.int32)  # the highest bit becomes the sign


def pack(
    layout: str, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, *, zeros: bool, bits: int
) -> Stored:
    """Return the tensors that a layout stores for a weight of integers."""
    rows, inner = values.shape
    if layout == "integers":
        return {"weight": (values - 128).to(torch.int8), "weight_scale": scale}
    if layout == "awq_gemv":
        padding = -scale.shape[1] % (8 * 128 // (inner // scale.shape[1]))  # as the kernel loads zeros
        wide = [torch.nn.functional.pad(each, (0, padding)) for each in (scale, zero)]
        return {"qweight": words(values, bits), "scales": wide[0].half(), "qzeros": words(wide[1], bits)}
    if layout == "compressed-tensors":
        stored = {"weight_packed": words(values, bits), "weight_scale": scale.half()}
        stored["weight_shape"] = torch.tensor([rows, inner])
        return stored | ({"weight_zero_point": words(zero.T, bits).T.contiguous()} if zeros else {})
    if layout == "awq":
        order = torch.arange(rows).view(-1, 8)[:, _AWQ].flatten()
        stored = {"qweight": words(values.T[:, order], bits), "scales": scale.half().T.contiguous()}
        return stored | ({"qzeros": words(zero.T[:, order], bits)} if zeros else {})
    return {
        "qweight": words(values, bits).T.contiguous(),
        "qzeros": words((zero.T - int(layout == "gptq")) & ((1 << bits) - 1), bits),
        "scales": scale.half().T.contiguous(),
        "g_idx": torch.arange(inner, dtype=torch.int32) // (inner // scale.shape[1]),
    }


def mxfp8(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Return a weight in MXFP8, scales as exponents of powers of 2 per 32 inputs, and its dequantized values."""
    blocks = weight.unflatten(1, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 448).log2().ceil()
    spread = exponents.exp2()[..., None]
    rounded = (blocks / spread).to(FP8)
    stored = {"weight": rounded.flatten(1), "weight_scale": (exponents + 127).to(torch.uint8)}
    return stored, (rounded.float() * spread).flatten(1)


def mxfp4(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Return a weight in MXFP4, and its dequantized values; the first value of a byte is in its low half."""
    floats = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = weight.unflatten(1, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    spread = exponents.exp2()[..., None]
    code = (blocks.abs()[..., None] / spread[..., None] - floats).abs().argmin(-1)
    signed = (code + 8 * (blocks < 0)).flatten(1)
    packed = (signed[:, 0::2] + 16 * signed[:, 1::2]).to(torch.uint8)
    meant = (floats[code] * blocks.sign() * spread).flatten(1)
    return {"weight": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, meant


def nvfp4(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Return a weight in ModelOpt's NVFP4, and its dequantized values; the first value of a byte is in its low half."""
    floats = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = weight.unflatten(1, (-1, 16))
    whole = weight.abs().max() / (6 * 448)
    scale = (blocks.abs().amax(-1) / 6 / whole).to(FP8)
    spread = (scale.float() * whole)[..., None]
    code = (blocks.abs()[..., None] / spread[..., None] - floats).abs().argmin(-1)
    signed = (code + 8 * (blocks < 0)).flatten(1)
    packed = (signed[:, 0::2] + 16 * signed[:, 1::2]).to(torch.uint8)
    meant = (floats[code] * blocks.sign() * spread).flatten(1)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor(0.01)}, meant


def nf4(weight: torch.Tensor, *, double: bool) -> tuple[Stored, torch.Tensor]:
    """Return a weight as bitsandbytes stores it in 4 bits, and its dequantized values; ``double``: 8-bit scales.

    Any table works, because it is stored. The first value of a byte is in its high half.
    """
    table = torch.linspace(-1, 1, 16) ** 3
    blocks = weight.reshape(-1, 64)
    scales, state = blocks.abs().amax(1), {"blocksize": 64, "shape": list(weight.shape), "quant_type": "nf4"}
    stored: Stored = {"weight.absmax": scales}
    if double:
        outer, offset, wide = torch.linspace(-1, 1, 256), float(scales.mean()), -(-len(scales) // 256) * 256
        shifted = torch.nn.functional.pad(scales - offset, (0, wide - len(scales))).view(-1, 256)
        largest = shifted.abs().amax(1)
        codes = ((shifted / largest[:, None])[..., None] - outer).abs().argmin(-1)
        scales = (outer[codes] * largest[:, None]).flatten()[: len(scales)] + offset
        stored = {"weight.absmax": codes.flatten()[: len(scales)].to(torch.uint8)}
        stored |= {"weight.nested_absmax": largest, "weight.nested_quant_map": outer}
        state |= {"nested_blocksize": 256, "nested_offset": offset}
    code = ((blocks / scales[:, None])[..., None] - table).abs().argmin(-1).flatten()
    stored["weight"] = (code[0::2] * 16 + code[1::2]).to(torch.uint8)[:, None]
    stored["weight.quant_map"] = table
    stored["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return stored, (table[code].view(-1, 64) * scales[:, None]).view(weight.shape)


def write(
    folder: Path,
    config: Mapping[str, Any],
    quantizer: Quantizer,
    inputs: Callable[[torch.Tensor], torch.Tensor] | None = None,
    family: str = "qwen2",
) -> PreTrainedModel:
    """Write a checkpoint with matmul weights stored by ``quantizer``, and return the equivalent model."""
    model = make_checkpoint(family, folder, sizes=SIZES)
    with torch.no_grad():
        for name, meant in rewrite(folder, config, quantizer).items():
            matmul = model.get_submodule(name)
            matmul.weight.copy_(meant)
            if inputs is not None:
                matmul.register_forward_pre_hook(lambda _, arguments: (inputs(arguments[0]),))
    return model


def rewrite(folder: Path, config: Mapping[str, Any], quantizer: Quantizer, *, head: bool = False) -> Stored:
    """Store the matmul weights of the checkpoint in ``folder`` by ``quantizer``; return the dequantized weights.

    ``head``: include lm_head.
    """
    tensors, meant = load_file(folder / "model.safetensors"), {}
    ends = ("_proj.weight", "lm_head.weight") if head else "_proj.weight"
    for name in [name.removesuffix(".weight") for name in tensors if name.endswith(ends)]:
        stored, meant[name] = quantizer(tensors.pop(f"{name}.weight"))
        tensors |= {f"{name}.{kind}": tensor.contiguous() for kind, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=dict(config))
    return meant


def write_pair(folder: Path, config: Mapping[str, Any], quantizer: Quantizer) -> tuple[Path, Path]:
    """Write a tiny target of two layers and a draft of one, both quantized with their lm_heads."""
    target, draft = (
        tiny_checkpoint(folder / name, layers=layers, seed=1, head_dim=32) for name, layers in (("t", 2), ("d", 1))
    )
    for checkpoint in (target, draft):
        rewrite(checkpoint, config, quantizer, head=True)
    return target, draft


def packed(folder: Path, tiles: str | None = None, bits: int | None = None) -> Checkpoint:
    """Write the checkpoint as a build packs it into a new folder, and open it.

    ``tiles``: write tiles for a GPU (LowBitFormat). ``bits``: the number of bits for unquantized weights.
    """
    checkpoint = Checkpoint.open(folder)
    out = folder / "packed"
    out.mkdir()
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    return write_quantized(checkpoint, ModelSpec.from_hf(checkpoint.config), out, bits, tiles=tiles).checkpoint


def texts_with_and_without_speculation(bundle: Path) -> tuple[list[list[list[int]]], int]:
    """Return the token ids of two requests without drafts and with four, and the number of accepted drafts."""
    texts, accepted = [], 0
    for drafted in (0, 4):
        with LLM(bundle, device="cpu", threads=1, num_draft_tokens=drafted) as llm:
            outputs = llm.generate(["json", "long " * 9], SamplingParams(temperature=0.8, seed=3, max_tokens=16))
            texts.append([output.token_ids for output in outputs])
            accepted += sum(output.speculation.num_accepted_draft_tokens for output in outputs)
    return texts, accepted
