"""Write tiny GGUF files with the package gguf, from checkpoints that transformers made.

That package cannot quantize to types K and IQ4: their matrices get random values of about the same size.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tandemrt.export.quantize.gguf.checkpoint import ALL_KEPT, KeptTypes, read_gguf, write_tensors
from tandemrt.export.read.checkpoint import Checkpoint

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek2": gguf.MODEL_ARCH.DEEPSEEK2,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}
_PERMUTED = ("llama", "granite", "granitemoe")  # queries and keys are in the order of interleaved pairs
_EXPERT = re.compile(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_OF_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def write_gguf(
    checkpoint: Path,
    file: Path,
    name: str,
    kind: str = "F32",
    *,
    most_tensors: int = 0,
    kinds: Mapping[str, str] | None = None,
    pre: str = "default",
    **keys: Any,
) -> dict[str, np.ndarray]:
    """Write ``checkpoint`` as llama.cpp's converter does; matrices in layers in ``kind``.

    ``kinds`` has the types of single matrices by their names in the checkpoint, also of the embedding and the head.
    ``pre`` names the splitting rules.
    A model of more than ``most_tensors`` is split into several files. ``keys`` are further keys of the metadata.
    Returns the float32 values of the tensors under the checkpoint's names.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, name, split_max_tensors=most_tensors)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)
    _add_tokenizer(writer, checkpoint, config["vocab_size"], pre, names_eos="eos_token_id" not in keys)
    latent = config["qk_nope_head_dim"] if "key_length_mla" in keys else 0
    values = _add_tensors(writer, checkpoint, name, kind, kinds or {}, heads, kv_heads, latent)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _add_tensors(
    writer: gguf.GGUFWriter,
    checkpoint: Path,
    name: str,
    kind: str,
    kinds: Mapping[str, str],
    heads: int,
    kv_heads: int,
    latent: int,
) -> dict[str, np.ndarray]:
    values = {key: tensor.float().numpy() for key, tensor in load_file(checkpoint / "model.safetensors").items()}
    layers = 1 + max(int(key.split(".")[2]) for key in values if ".layers." in key)
    names = gguf.get_tensor_name_map(ARCHITECTURES[name], layers)
    counts = {"q_proj": heads, "k_proj": kv_heads} if name in _PERMUTED else {}
    for key, parts in _stored(values, counts, heads, latent):
        quantized = gguf.GGMLQuantizationType[kinds.get(key, kind)]
        stored_name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, key
        if stored_name.endswith("attn_sinks"):
            stored_name += ".weight"
        stored = np.stack(parts) if len(parts) > 1 else parts[0]
        stored = stored.reshape(-1, stored.shape[-1]) if len(parts) == 1 and stored.ndim > 2 else stored
        if quantized != gguf.GGMLQuantizationType.F32 and stored.ndim > 1 and _is_quantized(key, kinds):
            data = quantized_rows(stored.reshape(-1, stored.shape[-1]), quantized)
            back = gguf.quants.dequantize(data, quantized).reshape(len(parts), *parts[0].shape)
            for part, dequantized in zip(parts, back, strict=True):
                part[...] = dequantized
            writer.add_tensor(stored_name, data.reshape(*stored.shape[:-1], -1), raw_dtype=quantized)
        else:
            offset = 1 if name.startswith("gemma") and key.endswith("norm.weight") else 0
            writer.add_tensor(stored_name, np.ascontiguousarray(stored + np.float32(offset)))
    return values


def _is_quantized(key: str, kinds: Mapping[str, str]) -> bool:
    router = key.endswith((".mlp.gate.weight", ".shared_expert_gate.weight", ".router.weight", ".layer.weight"))
    biases = key.endswith(".bias")
    return (".layers." in key and not router and not biases) or key in kinds


def _stored(
    tensors: dict[str, np.ndarray], counts: Mapping[str, int], heads: int, latent: int
) -> Iterator[tuple[str, Sequence[np.ndarray]]]:
    """Yield the name that the converter knows, and views of the checkpoint's values: one per expert or head in stacks.

    ``counts``: the number of heads by the last names of modules whose rows the file has in another order. ``latent``:
    the width of keys that are made of latent vectors, where the file splits them off from values; else 0.
    """
    stacks: dict[str, list[np.ndarray]] = {}
    for key, array in sorted(tensors.items(), key=lambda item: [int(each) for each in re.findall(r"\d+", item[0])]):
        module, _, kind = key.rpartition(".")
        if (expert := _EXPERT.fullmatch(key)) is not None:
            part = _OF_MIXTRAL.get(expert[3], expert[3])
            stacks.setdefault(f"{expert[1]}.mlp.experts.{part}.weight", []).append(array)
        elif latent and module.endswith(".kv_b_proj"):
            by_head = array.reshape(heads, -1, array.shape[-1])
            yield key.replace("kv_b", "k_b"), [each[:latent].T for each in by_head]
            yield key.replace("kv_b", "v_b"), [each[latent:] for each in by_head]
        elif kind == "e_score_correction_bias":
            yield f"{module}.e_score_correction.bias", [array]
        elif kind in ("gate_up_proj", "gate_up_proj_bias"):  # gpt-oss: outputs are last, and alternate
            suffix = "weight" if array.ndim > 2 else "bias"
            for at, part in enumerate(("gate_proj", "up_proj")):
                yield f"{module}.{part}.{suffix}", [each[..., at::2].T for each in array]
        elif kind in ("down_proj", "down_proj_bias"):
            yield f"{module}.down_proj.{'weight' if array.ndim > 2 else 'bias'}", [each.T for each in array]
        elif module.endswith(".block_sparse_moe.input_linear"):
            stem, half = module.replace("block_sparse_moe.input_linear", "mlp.experts"), array.shape[1] // 2
            yield f"{stem}.gate_proj.weight", list(array[:, :half])
            yield f"{stem}.up_proj.weight", list(array[:, half:])
        elif module.endswith(".block_sparse_moe.output_linear"):
            yield f"{module.replace('block_sparse_moe.output_linear', 'mlp.experts')}.down_proj.weight", list(array)
        elif module.endswith(".shared_mlp.input_linear"):
            stem, half = module.replace("shared_mlp.input_linear", "mlp.shared_mlp"), len(array) // 2
            yield f"{stem}.gate_proj.weight", [array[:half]]
            yield f"{stem}.up_proj.weight", [array[half:]]
        elif kind == "weight" and (count := counts.get(module.rpartition(".")[2])) is not None:
            by_head = array.reshape(count, 2, len(array) // count // 2, *array.shape[1:]).swapaxes(1, 2)
            yield key, [by_head]
        else:
            yield key, [array]
    yield from stacks.items()


# Type -> places of its float16 scales in a block, and the largest value of what each multiplies.
_SCALES = {
    "Q4_K": {0: 7.5 * 63, 2: 63},
    "Q5_K": {0: 15.5 * 63, 2: 63},
    "Q6_K": {208: 32 * 127},
    "IQ4_NL": {0: 127},
    "IQ4_XS": {0: 32 * 127},
}


def quantized_rows(matrix: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return the bytes of ``matrix`` in a type, uint8 [rows, bytes]; in types K and IQ4 of other values."""
    if kind.name not in _SCALES:
        data: np.ndarray = gguf.quants.quantize(matrix, kind)
        return data
    rng, (inputs, nbytes) = np.random.default_rng(matrix.size), gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (len(matrix), matrix.shape[1] // inputs, nbytes), dtype=np.uint8)
    if kind.name in ("Q4_K", "Q5_K"):  # minima near the scales, so that values are around zero
        blocks[:, :, 8:12] = blocks[:, :, 4:8] ^ 1
        low = blocks[:, :, 12:16] & 15
        blocks[:, :, 12:16] = low | (low ^ 1) << 4
    sizes = rng.uniform(0.5, 1, blocks.shape[:2])
    for at, most in _SCALES[kind.name].items():
        scales = 3 * matrix.std() / most * sizes
        blocks[:, :, at : at + 2] = scales.astype("<f2").view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(len(matrix), -1)


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, vocab: int, pre: str, *, names_eos: bool) -> None:
    path = checkpoint / "tokenizer.json"
    tokenizer = json.loads(path.read_text()) if path.exists() else {"model": {"vocab": {}, "merges": []}}
    added = {each["content"]: each["id"] for each in tokenizer.get("added_tokens", ())}
    ids = {index: token for token, index in (tokenizer["model"]["vocab"] | added).items()}
    tokens = [ids.get(index, f"[unused{index}]") for index in range(vocab)]
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in added else 1 for token in tokens])
    writer.add_token_merges(merges or ["Ġ Ġ"])
    if names_eos:
        writer.add_eos_token_id(added.get("<|im_end|>", 0))


def converted(file: Path, folder: Path, kept: KeptTypes = ALL_KEPT) -> Checkpoint:
    """Return the checkpoint of a file, without a tokenizer."""
    folder.mkdir()
    write_tensors(read_gguf(file, kept), folder)
    return Checkpoint.open(folder)
