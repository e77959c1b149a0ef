"""The graphs of an EAGLE-3 draft head (Li et al., arXiv 2503.01840): ``fuse`` of the target's features, and the head.

The head reads each token together with the state of the previous token: the target's fused features, or the head's own
state if that token was drafted. ``fuse`` is a separate graph, because the head's own states are never fused.
"""

import onnx_ir as ir

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import CacheKind
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.draft_vocabulary import EMBEDDING, draft_logits
from tandemrt.export.model.layers import decoder_layer
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.lowerings import STRATEGIES
from tandemrt.export.model.norm import stored_norm
from tandemrt.export.model.scaled_matmul import scaled_matmul_functions
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.eagle3 import Eagle3Spec


def build_fuse(spec: Eagle3Spec, checkpoint: Checkpoint, *, dtype: str, lowering: Lowering) -> ir.Model:
    """Build the graph of ``contract.fuse``. Raises BadCheckpoint for a tensor that is missing or misshapen."""
    names = contract.fuse(features=spec.feature_width, hidden=spec.layer.hidden, dtype=dtype)
    b = GraphBuilder("fuse")
    w = Weights(checkpoint, b, dtype, scaled_matmuls=STRATEGIES[lowering].scaled_matmuls)
    b.output(names["states"], _fused(b, b.input(names["features"]), w, spec))
    return b.model(scaled_matmul_functions(w))


def build_eagle3(
    spec: Eagle3Spec, checkpoint: Checkpoint, *, dtype: str, capacity: int, lowering: Lowering
) -> ir.Model:
    """Build the graph of ``contract.draft_head``.

    Raises BadCheckpoint, by name, for a tensor that is missing, unused or misshapen, and for inconsistent vocabulary
    maps.
    """
    strategies, layer = STRATEGIES[lowering], spec.layer
    cache: CacheKind = "paged" if lowering == "paged" else "linear"
    names = spec.contract(capacity=capacity, dtype=dtype, cache=cache)
    b = GraphBuilder("draft")
    w = Weights(checkpoint, b, dtype, scaled_matmuls=strategies.scaled_matmuls)
    graph_inputs = {binding.name: b.input(binding) for binding in names.inputs}
    prefix = _prefix(checkpoint)
    with b.scope("place"):
        attend = strategies.attention(b, layer, graph_inputs, capacity=capacity, dtype=dtype)
    with b.scope("embedding"):
        table = w.stored(EMBEDDING, (layer.vocab, layer.hidden))
        embedded = b.cast(b.op("Gather", table, graph_inputs["token_ids"]), dtype)
    graph_outputs: dict[str, ir.Value] = {}
    stream = graph_inputs["states"]
    if spec.mask_token is not None:
        with b.scope("masks"):
            mask = _fused(b, b.op("Squeeze", w("mask_hidden", (1, 1, spec.feature_width)), b.constant([0])), w, spec)
            masked = b.op("Equal", graph_inputs["token_ids"], b.constant(spec.mask_token))
            stream = b.op("Where", b.op("Unsqueeze", masked, b.constant([-1])), mask, stream)
    for at in range(layer.layers):
        name = prefix if at == 0 else f"layers.{at}"
        with b.scope(f"layers.{at}/attention"):
            if at == 0:
                state = stored_norm(b, stream, w, f"{name}.hidden_norm", layer)
                word = stored_norm(b, embedded, w, f"{name}.input_layernorm", layer)
                normed = b.op("Concat", word, state, axis=-1)
                stream = state if spec.norm_residual else stream
            else:
                normed = stored_norm(b, stream, w, f"{name}.input_layernorm", layer)
        stream, present = decoder_layer(b, stream, normed, w, layer, graph_inputs, strategies, attend, at, name)
        graph_outputs |= present
    with b.scope("head"):
        if not strategies.select_rows_early:
            stream = strategies.select_rows(b, stream, graph_inputs["score_rows"])
        normed = stored_norm(b, stream, w, "norm", layer) if spec.norm_before_head else stream
        if spec.mask_token is None:
            graph_outputs["next_states"] = normed if spec.norm_fed_back else stream
        graph_outputs["logits"] = draft_logits(b, normed, w, spec, checkpoint)
    for binding in names.outputs:
        b.output(binding, graph_outputs[binding.name])
    w.skip(*_fuse_tensors(spec), *(() if spec.norm_before_head else ("norm.weight",)))
    w.finish()
    return b.model((*strategies.functions(layer, dtype), *scaled_matmul_functions(w)))


def _fused(b: GraphBuilder, features: ir.Value, w: Weights, spec: Eagle3Spec) -> ir.Value:
    """The fused features [tokens, hidden] of ``features`` [tokens, features]."""
    if spec.norm_features:
        features = stored_norm(b, features, w, "input_norm", spec.layer)
    if spec.norm_each_feature:
        count = len(spec.features)
        parts = b.ops("Split", features, b.constant([spec.target_hidden] * count), outputs=count, axis=1)
        normed = [stored_norm(b, part, w, f"fc_norm.{at}", spec.layer) for at, part in enumerate(parts)]
        features = b.op("Concat", *normed, axis=1)
    return Linear.stored("fc", spec.layer.hidden)(b, features, w)


def _fuse_tensors(spec: Eagle3Spec) -> list[str]:
    """The tensors that ``build_fuse`` reads."""
    each = [f"fc_norm.{at}.weight" for at in range(len(spec.features))] if spec.norm_each_feature else []
    return ["fc.weight", *(["input_norm.weight"] if spec.norm_features else []), *each]


def _prefix(checkpoint: Checkpoint) -> str:
    """The name of the first layer's tensors: SafeAILab and SpecForge write ``midlayer``."""
    if any(name.startswith("midlayer.") for name in checkpoint.tensors):
        return "midlayer"
    if any(name.startswith("layers.0.") for name in checkpoint.tensors):
        return "layers.0"
    raise BadCheckpoint(
        f"{checkpoint.folder}: an EAGLE-3 head should have tensors 'layers.0.*' or 'midlayer.*', it has neither"
    )
