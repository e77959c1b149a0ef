"""Write a checkpoint of the Llama family as GGUF, the format of llama.cpp and OpenVINO (ggml's docs/gguf.md)."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import ml_dtypes  # noqa: F401  # bfloat16 for numpy
import numpy as np
from safetensors import safe_open

Form = Literal["F32", "F16", "Q8_0", "Q4_1"]
_TYPES: dict[Form, int] = {"F32": 0, "F16": 1, "Q4_1": 3, "Q8_0": 8}
_FILE_TYPES: dict[Form, int] = {"F32": 0, "F16": 1, "Q4_1": 3, "Q8_0": 7}
_ALIGNMENT = 32
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(checkpoint: Path, out: Path, form: Form) -> None:
    """Write the model of ``checkpoint``: matrices in ``form``, vectors in float32.

    Raises ValueError for other families than Llama.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"a GGUF file is written for llama models alone, received {config['model_type']}")
    tensors = {name: (form if array.ndim > 1 else "F32", array) for name, array in _tensors(checkpoint, config)}
    keys = _keys(checkpoint, config, form)
    with out.open("wb") as stream:
        stream.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)))
        for key, value in keys.items():
            stream.write(_string(key) + _value(value))
        at, sizes = 0, []
        for name, (kind, array) in tensors.items():
            dims = array.shape[::-1]
            stream.write(_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, _TYPES[kind], at))
            sizes.append(_bytes_of(array, kind))
            at += -(-sizes[-1] // _ALIGNMENT) * _ALIGNMENT
        for kind, array in tensors.values():
            _pad(stream)
            stream.write(_packed(array, kind))


def _tensors(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                array = opened.get_tensor(name).astype(np.float32)
                if name in _OUTSIDE:
                    yield _OUTSIDE[name], array
                    continue
                layer, _, rest = name.removeprefix("model.layers.").partition(".")
                short = _NAMES[rest.removesuffix(".weight")]
                if short in heads:  # its rotary embedding rotates adjacent pairs, not halves
                    array = array.reshape(heads[short], 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
                yield f"blk.{layer}.{short}.weight", np.ascontiguousarray(array)


def _keys(checkpoint: Path, config: dict[str, Any], form: Form) -> dict[str, Any]:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    added = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    ids = {index: token for token, index in (tokenizer["model"]["vocab"] | added).items()}
    tokens = [ids.get(index, f"[unused{index}]") for index in range(config["vocab_size"])]
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    end = config.get("eos_token_id")
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    model = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": config.get("head_dim") or config["hidden_size"] // heads,
        "rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        "vocab_size": config["vocab_size"],
    }
    return {
        "general.architecture": "llama",
        "general.name": checkpoint.name,
        "general.file_type": _FILE_TYPES[form],
        **{f"llama.{name}": value for name, value in model.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in added else 1 for token in tokens],
        "tokenizer.ggml.merges": merges or ["Ġ Ġ"],  # readers require one
        "tokenizer.ggml.eos_token_id": end if isinstance(end, int) else max(added.values(), default=0),
        "tokenizer.ggml.bos_token_id": config.get("bos_token_id") or 0,
    }


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    kind = 8 if isinstance(value[0], str) else 5
    items = map(_string, value) if kind == 8 else (struct.pack("<i", each) for each in value)
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)


def _bytes_of(array: np.ndarray, kind: Form) -> int:
    return int(array.size * {"F32": 4, "F16": 2, "Q8_0": 34 / 32, "Q4_1": 20 / 32}[kind])


def _packed(array: np.ndarray, kind: Form) -> bytes:
    if kind in ("F32", "F16"):
        return array.astype("<f4" if kind == "F32" else "<f2").tobytes()
    blocks = array.reshape(-1, 32)
    if kind == "Q8_0":
        scale = np.abs(blocks).max(1, keepdims=True) / 127
        steps = np.rint(blocks / np.where(scale == 0, 1, scale)).astype(np.int8)
        return np.concatenate([scale.astype("<f2").view(np.int8), steps], 1).tobytes()
    low = blocks.min(1, keepdims=True)
    scale = (blocks.max(1, keepdims=True) - low) / 15
    steps = np.clip(np.rint((blocks - low) / np.where(scale == 0, 1, scale)), 0, 15).astype(np.uint8)
    nibbles = steps[:, :16] | steps[:, 16:] << 4
    return np.concatenate([scale.astype("<f2").view(np.uint8), low.astype("<f2").view(np.uint8), nibbles], 1).tobytes()


def _pad(stream: BinaryIO) -> None:
    stream.write(b"\0" * (-stream.tell() % _ALIGNMENT))
