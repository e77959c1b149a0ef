"""The graphs of a DFlash draft (arXiv 2602.06036): what writes the target's features into its cache, and the block.

The cache holds, for every token of a text, keys and values of the target's features of that token, by each layer's own
weights. A block is the newest token, whose features nobody knows yet, and masks behind it.
"""

from collections.abc import Mapping

import onnx_ir as ir

from tandemrt.engines.contract import CacheKind
from tandemrt.export.model.attention import Cache
from tandemrt.export.model.block_attention import LinearBlock, by_layers
from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.draft_vocabulary import EMBEDDING, draft_logits
from tandemrt.export.model.layers import block, heads_of
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.lowerings import STRATEGIES, Lowering
from tandemrt.export.model.markov import tensors_of
from tandemrt.export.model.norm import rms_norm
from tandemrt.export.model.paged_block import PagedBlock
from tandemrt.export.model.scaled_product import scaled_functions
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.dflash import DFlashSpec
from tandemrt.export.read.dspark import DSparkSpec

LOWERINGS: Mapping[str, type[LinearBlock] | type[PagedBlock]] = {"grouped": LinearBlock, "paged": PagedBlock}
_FEATURES = ("fc.weight", "hidden_norm.weight")


def build_context(
    spec: DFlashSpec, checkpoint: Checkpoint, *, dtype: str, capacity: int, attention: Lowering
) -> ir.Model:
    """Build the graph of ``contract.context``. Raises BadCheckpoint for a tensor that is missing or misshapen."""
    how, layer = STRATEGIES[attention], spec.layer
    names = spec.context(capacity=capacity, dtype=dtype, cache=_cache(attention))
    b = GraphBuilder("context")
    w = Weights(checkpoint, b, dtype, scaled_products=how.scaled_products)
    given = {binding.name: b.input(binding) for binding in names.inputs}
    state = rms_norm(b, Linear.stored("fc", layer.hidden)(b, given["features"], w), w, "hidden_norm", layer)
    with b.scope("place"):
        attend = LOWERINGS[attention].of(b, layer, given, block=spec.block, capacity=capacity, dtype=dtype)
    made: dict[str, ir.Value] = {}
    for at in range(layer.layers):
        with b.scope(f"layers.{at}"):
            past = Cache(given[f"past_key.{at}"], given[f"past_value.{at}"])
            present = attend.context(b, state, w, heads_of(layer, at, f"layers.{at}.self_attn"), past)
            made |= {f"present_key.{at}": present.key, f"present_value.{at}": present.value}
    for binding in names.outputs:
        b.output(binding, made[binding.name])
    model = b.model((*how.functions(layer, dtype), *scaled_functions(w)))
    for change in how.passes:
        change(model)
    return model


def build_dflash(
    spec: DFlashSpec, checkpoint: Checkpoint, *, dtype: str, capacity: int, attention: Lowering
) -> ir.Model:
    """Build the graph of ``contract.block`` whose calls have ``spec.block`` tokens a row.

    Raises BadCheckpoint, by name, for a tensor that is missing, unused, or of another shape than the config says, and
    for maps of the vocabulary that do not hold together.
    """
    how, layer = STRATEGIES[attention], spec.layer
    names = spec.contract(capacity=capacity, dtype=dtype, cache=_cache(attention))
    b = GraphBuilder("draft")
    w = Weights(checkpoint, b, dtype, scaled_products=how.scaled_products)
    given = {binding.name: b.input(binding) for binding in names.inputs}
    with b.scope("place"):
        mutual = LOWERINGS[attention].of(b, layer, given, block=spec.block, capacity=capacity, dtype=dtype).mutual
        causal = how.attention(b, layer, given, capacity=capacity, dtype=dtype)
    attend = by_layers(causal, mutual, spec.causal)
    with b.scope("embedding"):
        table = w.stored(EMBEDDING, (layer.vocab, layer.hidden))
        stream = b.cast(b.op("Gather", table, given["token_ids"]), dtype)
    made: dict[str, ir.Value] = {}
    for at in range(layer.layers):
        with b.scope(f"layers.{at}/attention"):
            normed = rms_norm(b, stream, w, f"layers.{at}.input_layernorm", layer)
        stream, present = block(b, stream, normed, w, layer, given, how, attend, at, f"layers.{at}")
        made |= present
    with b.scope("head"):
        if not how.pick_early:
            stream = how.pick(b, stream, given["score_rows"])
        last = rms_norm(b, stream, w, "norm", layer)
        made |= {"row_states": last, "logits": draft_logits(b, last, w, spec, checkpoint)}
    for binding in names.outputs:
        b.output(binding, made[binding.name])
    w.skip(*_FEATURES, *(tensors_of(spec) if isinstance(spec, DSparkSpec) else ()))
    w.finish()
    model = b.model((*how.functions(layer, dtype), *scaled_functions(w)))
    for change in how.passes:
        change(model)
    return model


def _cache(attention: Lowering) -> CacheKind:
    return "paged" if attention == "paged" else "linear"
