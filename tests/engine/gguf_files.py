"""Write tiny GGUF files with the package gguf, from checkpoints that transformers made.

That package cannot quantize to types K and IQ4: their matrices get random values of about the same size.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tandemrt.export.quantize.gguf.checkpoint import read_gguf, write_tensors
from tandemrt.export.read.checkpoint import Checkpoint

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}


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
    values = _add_tensors(writer, checkpoint, name, kind, kinds or {}, heads, kv_heads)
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
) -> dict[str, np.ndarray]:
    tensors = {key: tensor.float().numpy() for key, tensor in load_file(checkpoint / "model.safetensors").items()}
    layers = 1 + max(int(key.split(".")[2]) for key in tensors if ".layers." in key)
    names = gguf.get_tensor_name_map(ARCHITECTURES[name], layers)
    values = dict(tensors)
    for layer in range(layers):  # experts are stored as one tensor
        for part in ("gate_proj", "up_proj", "down_proj"):
            each = [key for key in tensors if f".layers.{layer}.mlp.experts." in key and part in key]
            each.sort(key=lambda key: int(key.split(".")[5]))
            if each:
                stacked = np.stack([tensors.pop(key) for key in each])
                tensors[f"model.layers.{layer}.mlp.experts.{part}.weight"] = stacked
    for key, array in tensors.items():
        quantized = gguf.GGMLQuantizationType[kinds.get(key, kind)]
        stored_name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, key
        stored = array + 1 if name.startswith("gemma") and key.endswith("norm.weight") else array
        if name == "llama" and ("q_proj" in key or "k_proj" in key):
            count = heads if "q_proj" in key else kv_heads
            shape = stored.shape
            stored = stored.reshape(count, 2, shape[0] // count // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        if quantized != gguf.GGMLQuantizationType.F32 and array.ndim == 2 and (".layers." in key or key in kinds):
            data = quantized_rows(stored, quantized)
            writer.add_tensor(stored_name, data, raw_dtype=quantized)
            back = gguf.quants.dequantize(data, quantized)
            if name == "llama" and ("q_proj" in key or "k_proj" in key):
                back = back.reshape(count, shape[0] // count // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
            values[key] = back
        else:
            writer.add_tensor(stored_name, np.ascontiguousarray(stored, np.float32))
    return values


# Type -> places of its float16 scales in a block, and the largest value of what each multiplies.
_SCALES = {
    "Q4_K": {0: 15 * 63, 2: 63},
    "Q5_K": {0: 31 * 63, 2: 63},
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
    for at, most in _SCALES[kind.name].items():
        scales = 3 * matrix.std() / most * rng.uniform(0.5, 1, blocks.shape[:2])
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


def converted(file: Path, folder: Path) -> Checkpoint:
    """Return the checkpoint of a file, without a tokenizer."""
    folder.mkdir()
    write_tensors(read_gguf(file), folder)
    return Checkpoint.open(folder)
