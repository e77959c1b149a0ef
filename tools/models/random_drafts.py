"""Write a draft with random weights for a random target, in the shapes of published drafts.

Its tokens are random, so benchmarks accept them by the rule ``synthetic``.
"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from tools.models.filler_tokenizer import write_tokenizer
from tools.models.quantized_weights import WeightFormat, quantize_matmuls, write_quantization_config
from tools.models.random_checkpoint import Dtype, Family, Size, write_config
from tools.models.random_pair import random_tensors, special_ids, write_tensors

Shapes = dict[str, tuple[int, ...]]
REDUCED_VOCAB = 32_000  # tokens of EAGLE-3 heads
BLOCK_LAYERS, BLOCK = 5, {"dflash": 16, "dspark": 7}
MARKOV_RANK = 256
_LAYER = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("rope_parameters", "hidden_act", "attention_bias", "max_position_embeddings", "vocab_size"),
)


class Kind(StrEnum):
    """Kinds of drafts. ``model`` is written together with its target (tools/models/random_pair.py)."""

    MODEL = "model"
    EAGLE3 = "eagle3"
    PARD = "pard"
    DFLASH = "dflash"
    DSPARK = "dspark"
    MTP = "mtp"


def write_draft(
    folder: Path, kind: Kind, target: Path, *, device: str, dtype: Dtype, float8: bool = False, seed: int = 1
) -> None:
    """Write the checkpoint of a draft for the Llama in ``target``; the weights are made on ``device``.

    eagle3: one layer of the target's width, 32,000 tokens (an eighth of a smaller vocabulary). pard: a Llama of 1B
    for a vocabulary of that size, else one of the small size. dflash: 5 layers, blocks of 16. dspark: 5 layers, blocks
    of 7, and a Markov head of rank 256. mtp: one layer.
    ``float8``: quantize all matmuls but those that run once a round and those shared with the target.
    """
    config = json.loads((target / "config.json").read_text())
    if kind is Kind.PARD:
        _write_pard(folder, config, device=device, dtype=dtype, float8=float8, seed=seed)
        return
    layers, hidden, vocab = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    layer: dict[str, Any] = {name: config[name] for name in _LAYER} | {"tie_word_embeddings": False}
    # A head rotates all values of its heads, whatever the target does.
    layer["rope_parameters"] = {
        name: value for name, value in config["rope_parameters"].items() if name != "partial_rotary_factor"
    }
    features = [2, layers // 2, layers - 3] if layers > 6 else [1, 2, 3]
    own: dict[str, Any] = {"aux_hidden_state_layer_ids": features, "mask_token_id": vocab - 5}
    count, family, prefix, inner = 1, "llama", "layers", hidden
    fused: Shapes = {"fc.weight": (hidden, len(features) * hidden), "norm.weight": (hidden,)}
    known: dict[str, torch.Tensor] = {}
    if kind is Kind.EAGLE3:
        size = REDUCED_VOCAB if vocab > 2 * REDUCED_VOCAB else vocab // 8
        own = {"eagle_aux_hidden_state_layer_ids": features, "draft_vocab_size": size}
        fused |= {"lm_head.weight": (size, hidden), "layers.0.hidden_norm.weight": (hidden,)}
        known["d2t"] = torch.arange(size) * (vocab // size - 1)  # evenly spaced tokens
        inner = 2 * hidden
    elif kind in (Kind.DFLASH, Kind.DSPARK):
        own |= {"draft_vocab_size": vocab, "block_size": BLOCK[kind]}
        count, family = BLOCK_LAYERS, "qwen3"
        fused["hidden_norm.weight"] = (hidden,)
        if kind is Kind.DSPARK:
            own |= {"markov_rank": MARKOV_RANK, "markov_head_type": "vanilla"}
            fused |= {f"markov_head.markov_w{each}.weight": (vocab, MARKOV_RANK) for each in (1, 2)}
    else:
        own, prefix = {"num_nextn_predict_layers": 1}, "mtp_layers"
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        fused = {f"mtp_layers.0.{name}.weight": (hidden,) for name in norms}
        fused["mtp_layers.0.input_proj.weight"] = (hidden, 2 * hidden)
    shapes = fused
    for at in range(count):
        shapes |= _layer(f"{prefix}.{at}", layer, inner=inner if at == 0 else hidden, normed=family == "qwen3")
    folder.mkdir(parents=True, exist_ok=True)
    inside = layer | {"model_type": family, "num_hidden_layers": layers if kind is Kind.MTP else count}
    fields = {"speculators_model_type": kind.value, "transformer_layer_config": inside}
    (folder / "config.json").write_text(json.dumps(fields | own))
    weights = dict(random_tensors(shapes, getattr(torch, dtype.value), device, seed))
    weights = quantize_matmuls(weights, WeightFormat.FP8 if float8 else WeightFormat.UNQUANTIZED) | known
    write_tensors(folder, weights.items())
    if float8:
        unquantized = {Kind.EAGLE3: [], Kind.DSPARK: ["lm_head", "markov_head.markov_w2"]}.get(kind, ["lm_head"])
        write_quantization_config(folder, WeightFormat.FP8, unquantized=["fc", *unquantized])


def _write_pard(folder: Path, target: dict[str, Any], *, device: str, dtype: Dtype, float8: bool, seed: int) -> None:
    vocab = target["vocab_size"]
    size, layers = (Size.B1, None) if vocab > REDUCED_VOCAB else (Size.SMALL, 1)
    more = {**special_ids(vocab), "vocab_size": vocab, "pard_token": vocab - 5}
    shapes = write_config(folder, Family.LLAMA, size, layers=layers, dtype=dtype, **more)
    weights = dict(random_tensors(shapes, getattr(torch, dtype.value), device, seed))
    write_tensors(folder, quantize_matmuls(weights, WeightFormat.FP8 if float8 else WeightFormat.UNQUANTIZED).items())
    if float8:
        write_quantization_config(folder, WeightFormat.FP8, unquantized=["model.embed_tokens"])  # tied to the lm_head
    write_tokenizer(folder, vocab)


def _layer(name: str, config: dict[str, Any], *, inner: int, normed: bool) -> Shapes:
    """Return the tensors of a layer whose attention reads ``inner`` values. ``normed``: queries and keys have norms."""
    hidden, wide, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    shapes: Shapes = {f"{name}.self_attn.{kind}_norm.weight": (size,) for kind in "qk"} if normed else {}
    shapes |= {f"{name}.{each}.weight": (hidden,) for each in ("input_layernorm", "post_attention_layernorm")}
    for kind, width in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        shapes[f"{name}.self_attn.{kind}_proj.weight"] = (width, inner)
    shapes[f"{name}.self_attn.o_proj.weight"] = (hidden, heads)
    shapes |= {f"{name}.mlp.{kind}_proj.weight": (wide, hidden) for kind in ("gate", "up")}
    return shapes | {f"{name}.mlp.down_proj.weight": (hidden, wide)}
