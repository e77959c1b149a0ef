"""The graph of a target or of an independent draft model: tokens in, logits of chosen rows and an updated cache out."""

from typing import get_args

import onnx_ir as ir

from tandemrt.engines.errors import BadCheckpoint, BadRecipe
from tandemrt.export.model import layers as blocks
from tandemrt.export.model import paged
from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.layers import Cache, Lowering, Place
from tandemrt.export.model.weights import COMPUTE_DTYPES, Weights
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec


def build_decoder(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    capacity: int,
    attention: Lowering,
    weights_dir: str = "",
) -> ir.Model:
    """Build the graph whose bindings are ``contract.decoder``.

    ``dtype`` is the compute dtype (float32, float16, bfloat16); tensors stored otherwise are cast. ``capacity`` is
    the number of tokens a cache row holds, slack for the padded tail of the last window included: a row must keep
    ``write_index + query <= capacity``. ``attention`` is the lowering: *length* tells the operator how many cache
    entries count, *mask* gives it a boolean mask, *paged* has a paged cache and operators of the project's own, to
    be cut at; all compute the same. ``weights_dir`` is the folder, relative to the graph file, where the checkpoint's
    safetensors will lie.

    Raises BadCheckpoint, by name, for a tensor that is missing, unused, or of another shape than the config says,
    and, unless paged, for a capacity beyond the model's sliding window; BadRecipe for an unknown dtype or lowering.
    """
    _check(spec, dtype, capacity, attention)
    paged_cache = attention == "paged"
    names = spec.contract(capacity=capacity, dtype=dtype, cache="paged" if paged_cache else "linear")
    b = GraphBuilder("decoder")
    w = Weights(checkpoint, b, dtype, weights_dir)
    given = {binding.name: b.input(binding) for binding in names.inputs}

    with b.scope("embedding"):
        table = w.stored("model.embed_tokens.weight", (spec.vocab, spec.hidden))
        hidden = b.cast(b.op("Gather", table, given["token_ids"]), dtype)
    if paged_cache:
        picked, made = paged.stack(b, hidden, w, spec, given, capacity=capacity)
    else:
        picked, made = _stack(b, hidden, w, spec, given, capacity=capacity, attention=attention)
    with b.scope("head"):
        head = "model.embed_tokens" if spec.tied else "lm_head"
        made["logits"] = blocks.linear(b, picked, w, head, spec.vocab)
    for binding in names.outputs:
        b.output(binding, made[binding.name])
    if spec.tied:
        w.same("lm_head.weight", "model.embed_tokens.weight")
    w.finish()
    return b.model(paged.functions(spec) if paged_cache else ())


def _stack(
    b: GraphBuilder,
    hidden: ir.Value,
    w: Weights,
    spec: ModelSpec,
    given: dict[str, ir.Value],
    *,
    capacity: int,
    attention: Lowering,
) -> tuple[ir.Value, dict[str, ir.Value]]:
    """All layers and the last norm over a linear cache: [batch, rows, hidden] and the caches afterwards."""
    tokens, index, rows = given["token_ids"], given["write_index"], given["score_rows"]
    with b.scope("place"):
        at = blocks.place(b, tokens, index, spec.rope, capacity=capacity, dtype=w.dtype, lowering=attention)
    made: dict[str, ir.Value] = {}
    for layer in range(spec.layers):
        past = Cache(given[f"past_key.{layer}"], given[f"past_value.{layer}"])
        with b.scope(f"layers.{layer}"):
            hidden, present = _layer(b, hidden, w, f"model.layers.{layer}", spec, at, past)
        made |= {f"present_key.{layer}": present.key, f"present_value.{layer}": present.value}
    with b.scope("head"):
        # Rows are picked before the norm and the head, so that only rows somebody reads cost a product.
        picked = blocks.rms_norm(b, blocks.pick_rows(b, hidden, rows), w, "model.norm", spec.norm_eps)
    return picked, made


def _layer(
    b: GraphBuilder, hidden: ir.Value, w: Weights, name: str, spec: ModelSpec, at: Place, past: Cache
) -> tuple[ir.Value, Cache]:
    with b.scope("attention"):
        normed = blocks.rms_norm(b, hidden, w, f"{name}.input_layernorm", spec.norm_eps)
        mixed, present = blocks.attention(b, normed, w, f"{name}.self_attn", spec, at, past)
        hidden = b.op("Add", hidden, mixed)
    with b.scope("mlp"):
        normed = blocks.rms_norm(b, hidden, w, f"{name}.post_attention_layernorm", spec.norm_eps)
        return b.op("Add", hidden, blocks.gated_mlp(b, normed, w, f"{name}.mlp", spec)), present


def _check(spec: ModelSpec, dtype: str, capacity: int, attention: str) -> None:
    if dtype not in COMPUTE_DTYPES:
        raise BadRecipe(f"dtype should be one of {', '.join(COMPUTE_DTYPES)}, it is {dtype!r}")
    if attention not in get_args(Lowering):
        raise BadRecipe(f"attention should be one of {', '.join(get_args(Lowering))}, it is {attention!r}")
    if capacity < 1:
        raise BadRecipe(f"capacity should be at least 1 token, it is {capacity}")
    if attention != "paged" and spec.window is not None and capacity > spec.window:
        raise BadCheckpoint(
            f"config.json: sliding_window is {spec.window} and the capacity {capacity}; sliding-window attention needs "
            "a paged cache, so a row of this one may hold at most the window: lower the length limit"
        )
