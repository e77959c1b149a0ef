"""The graphs of a DFlash draft (arXiv 2602.06036): ``context`` fills the draft's cache, ``draft`` predicts a block.

The cache holds keys and values that each layer computes from the target's features of every token. A draft block is
the newest token, whose features do not exist yet, followed by mask tokens.
"""

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from tandemrt.engines.contract.contract import CacheKind
from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.attention import LayerCache
from tandemrt.export.model.block_draft_attention import LinearCacheBlockAttention, attention_by_layer
from tandemrt.export.model.draft_vocabulary import EMBEDDING, draft_logits
from tandemrt.export.model.layers import Around, attention_weights, decoder_layer
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.lowerings import STRATEGIES
from tandemrt.export.model.norm import stored_norm
from tandemrt.export.model.paged_block_draft import PagedBlockAttention
from tandemrt.export.model.scaled_matmul import scaled_matmul_functions
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.dflash import DFlashSpec

LOWERINGS: Mapping[str, type[LinearCacheBlockAttention] | type[PagedBlockAttention]] = {
    "grouped": LinearCacheBlockAttention,
    "paged": PagedBlockAttention,
}
_FEATURES = ("fc.weight", "hidden_norm.weight")


def build_context(
    spec: DFlashSpec, checkpoint: Checkpoint, *, dtype: str, capacity: int, lowering: Lowering
) -> ir.Model:
    """Build the graph of ``contract.context``. Raises BadCheckpoint for a tensor that is missing or misshapen."""
    strategies, layer = STRATEGIES[lowering], spec.layer
    names = spec.context(capacity=capacity, dtype=dtype, cache=_cache(lowering))
    b = GraphBuilder("context")
    w = Weights(checkpoint, b, dtype, scaled_matmuls=strategies.scaled_matmuls)
    graph_inputs = {binding.name: b.input(binding) for binding in names.inputs}
    state = stored_norm(b, Linear.stored("fc", layer.hidden)(b, graph_inputs["features"], w), w, "hidden_norm", layer)
    with b.scope("place"):
        attend = LOWERINGS[lowering].of(b, layer, graph_inputs, block=spec.block_size, capacity=capacity, dtype=dtype)
    graph_outputs: dict[str, ir.Value] = {}
    for at in range(layer.layers):
        with b.scope(f"layers.{at}"):
            past = LayerCache(graph_inputs[f"past_key.{at}"], graph_inputs[f"past_value.{at}"])
            present = attend.context(b, state, w, attention_weights(layer, at, f"layers.{at}.self_attn"), past)
            graph_outputs |= {f"present_key.{at}": present.key, f"present_value.{at}": present.value}
    for binding in names.outputs:
        b.output(binding, graph_outputs[binding.name])
    return b.model((*strategies.functions(layer, dtype), *scaled_matmul_functions(w)))


def build_dflash(
    spec: DFlashSpec,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    capacity: int,
    lowering: Lowering,
    around: Around | None = None,
) -> ir.Model:
    """Build the graph of ``contract.block``, whose calls have ``spec.block_size`` tokens per row.

    ``around``: see layers.py.
    Raises BadCheckpoint, by name, for a tensor that is missing, unused or misshapen, and for inconsistent vocabulary
    maps.
    """
    strategies, layer = STRATEGIES[lowering], spec.layer
    if around is not None:
        strategies = replace(strategies, select_rows_early=False)
    names = spec.contract(capacity=capacity, dtype=dtype, cache=_cache(lowering))
    b = GraphBuilder("draft")
    w = Weights(checkpoint, b, dtype, scaled_matmuls=strategies.scaled_matmuls)
    graph_inputs = {binding.name: b.input(binding) for binding in names.inputs}
    with b.scope("place"):
        bidirectional = (
            LOWERINGS[lowering]
            .of(b, layer, graph_inputs, block=spec.block_size, capacity=capacity, dtype=dtype)
            .bidirectional
        )
        causal = strategies.attention(b, layer, graph_inputs, capacity=capacity, dtype=dtype)
    attend = attention_by_layer(causal, bidirectional, spec.causal)
    with b.scope("embedding"):
        table = w.stored(EMBEDDING, (layer.vocab, layer.hidden))
        stream = b.cast(b.op("Gather", table, graph_inputs["token_ids"]), dtype)
    graph_outputs: dict[str, ir.Value] = {}
    for at in range(layer.layers):
        with b.scope(f"layers.{at}/attention"):
            normed = stored_norm(b, stream, w, f"layers.{at}.input_layernorm", layer)
        stream, present = decoder_layer(
            b, stream, normed, w, layer, graph_inputs, strategies, attend, at, f"layers.{at}", around=around
        )
        graph_outputs |= present
    with b.scope("head"):
        if not strategies.select_rows_early:
            stream = strategies.select_rows(b, stream, graph_inputs["score_rows"])
        last = stored_norm(b, stream, w, "norm", layer)
        graph_outputs |= {"row_states": last, "logits": draft_logits(b, last, w, spec, checkpoint)}
    for binding in names.outputs:
        b.output(binding, graph_outputs[binding.name])
    w.skip(*_FEATURES, *spec.further_tensors)
    w.finish()
    return b.model((*strategies.functions(layer, dtype), *scaled_matmul_functions(w)))


def _cache(lowering: Lowering) -> CacheKind:
    return "paged" if lowering == "paged" else "linear"
