"""Latent attention in GGUF files (deepseek2): its widths, and the weight of keys and values, which files may split.

Source: conversion/deepseek.py of llama.cpp.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.quantize.writer import Entry

_KEYS, _VALUES = ".attn_k_b.weight", ".attn_v_b.weight"


def latent_fields(own: dict[str, Any]) -> dict[str, Any]:
    """Take the keys of latent attention and of its experts from ``own`` and return the fields of config.json.

    Later files have the widths of a cached head in ``key_length`` and ``value_length``, and others in the keys of
    _mla.
    """
    rotated = _number(own, "rope.dimension_count") or 64
    stored = [_number(own, f"attention.{part}_length") for part in ("key", "value")]
    of_heads = [_number(own, f"attention.{part}_length_mla") for part in ("key", "value")]
    key, value = stored if of_heads[0] is None else of_heads
    factor = _number(own, "rope.scaling.yarn_log_multiplier")
    groups = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
    own.pop("attention.head_count_kv", None)  # 1 in later files
    own.pop("expert_gating_func", None)  # gguf_family reads it
    return {
        "q_lora_rank": own.pop("attention.q_lora_rank", None),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": None if key is None else key - rotated,
        "v_head_dim": value,
        "mscale_all_dim": None if factor is None else round(10 * factor, 4),  # stored times 0.1
        **{field: _number(own, of) or 1 for field, of in groups.items()},
    }


def _number(own: dict[str, Any], key: str) -> Any:
    """Take the number ``key`` from ``own``; None: it is absent. Raises BadCheckpoint for another value."""
    value = own.pop(key, None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise BadCheckpoint(f"{key} should be a number, it is {quoted(value)}; download the file again")
    return value


def sharpened(config: dict[str, Any]) -> dict[str, Any]:
    """Return YaRN's rule with its factors of attention scores, which files state as one number."""
    factor = config.pop("mscale_all_dim")
    if factor is None or "rope_scaling" not in config:
        return {}
    return {"rope_scaling": config["rope_scaling"] | {"mscale": factor, "mscale_all_dim": factor}}


def joined_keys_and_values(tensors: dict[str, Any]) -> Iterator[Entry]:
    """Take the split weights of keys and values from ``tensors`` and yield them joined, in float32.

    Keys are [heads, latent, width], values [heads, width, latent]; a head of the joined weight has both.
    """
    split = [name for name in tensors if name.endswith(_KEYS) and name.replace(_KEYS, _VALUES) in tensors]
    for name in split:
        layer = name.split(".")[1]
        keys, values = tensors.pop(name), tensors.pop(name.replace(_KEYS, _VALUES))
        (width, latent, heads), of_value = map(int, keys.shape), int(values.shape[1])
        stored = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        yield Entry(stored, "float32", (heads * (width + of_value), latent), partial(_joined, keys, values))


def _joined(keys: Any, values: Any) -> Iterator[bytes]:
    both = np.concatenate([_floats(keys).swapaxes(1, 2), _floats(values)], axis=1)
    yield np.ascontiguousarray(both, np.float32).tobytes()


def _floats(tensor: Any) -> npt.NDArray[np.float32]:
    from gguf import dequantize

    shape = tuple(int(size) for size in reversed(tensor.shape))
    values: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
    return values
