"""The graphs of an EAGLE-3 head (Li et al., arXiv 2503.01840): what fuses the target's features, and the head itself.

A token is fed with the state of the token before it: the target's, fused, or the head's own for a drafted one. What
``fuse`` makes is a graph of its own, because a state that the head made itself is never fused.
"""

import onnx_ir as ir

from tandemrt.engines import contract
from tandemrt.engines.contract import CacheKind
from tandemrt.engines.errors import BadCheckpoint
from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.draft_vocabulary import EMBEDDING, draft_logits
from tandemrt.export.model.layers import block
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.lowerings import STRATEGIES, Lowering
from tandemrt.export.model.norm import rms_norm
from tandemrt.export.model.scaled_product import scaled_functions
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.eagle3 import Eagle3Spec


def build_fuse(spec: Eagle3Spec, checkpoint: Checkpoint, *, dtype: str, attention: Lowering) -> ir.Model:
    """Build the graph of ``contract.fuse``. Raises BadCheckpoint for a tensor that is missing or of another shape."""
    names = contract.fuse(features=spec.feature_width, hidden=spec.layer.hidden, dtype=dtype)
    b = GraphBuilder("fuse")
    w = Weights(checkpoint, b, dtype, scaled_products=STRATEGIES[attention].scaled_products)
    b.output(names["states"], _fused(b, b.input(names["features"]), w, spec))
    return b.model(scaled_functions(w))


def build_eagle3(
    spec: Eagle3Spec, checkpoint: Checkpoint, *, dtype: str, capacity: int, attention: Lowering
) -> ir.Model:
    """Build the graph of ``contract.draft_head``.

    Raises BadCheckpoint, by name, for a tensor that is missing, unused, or of another shape than the config says, and
    for maps of the vocabulary that do not hold together.
    """
    how, layer = STRATEGIES[attention], spec.layer
    cache: CacheKind = "paged" if attention == "paged" else "linear"
    names = spec.contract(capacity=capacity, dtype=dtype, cache=cache)
    b = GraphBuilder("draft")
    w = Weights(checkpoint, b, dtype, scaled_products=how.scaled_products)
    given = {binding.name: b.input(binding) for binding in names.inputs}
    prefix = _prefix(checkpoint)
    with b.scope("place"):
        attend = how.attention(b, layer, given, capacity=capacity, dtype=dtype)
    with b.scope("embedding"):
        table = w.stored(EMBEDDING, (layer.vocab, layer.hidden))
        embedded = b.cast(b.op("Gather", table, given["token_ids"]), dtype)
    made: dict[str, ir.Value] = {}
    stream = given["states"]
    if spec.mask_token is not None:
        with b.scope("masks"):
            mask = _fused(b, b.op("Squeeze", w("mask_hidden", (1, 1, spec.feature_width)), b.constant([0])), w, spec)
            masked = b.op("Equal", given["token_ids"], b.constant(spec.mask_token))
            stream = b.op("Where", b.op("Unsqueeze", masked, b.constant([-1])), mask, stream)
    for at in range(layer.layers):
        name = prefix if at == 0 else f"layers.{at}"
        with b.scope(f"layers.{at}/attention"):
            if at == 0:
                state = rms_norm(b, stream, w, f"{name}.hidden_norm", layer)
                word = rms_norm(b, embedded, w, f"{name}.input_layernorm", layer)
                normed = b.op("Concat", word, state, axis=-1)
                stream = state if spec.norm_residual else stream
            else:
                normed = rms_norm(b, stream, w, f"{name}.input_layernorm", layer)
        stream, present = block(b, stream, normed, w, layer, given, how, attend, at, name)
        made |= present
    with b.scope("head"):
        if not how.pick_early:
            stream = how.pick(b, stream, given["score_rows"])
        normed = rms_norm(b, stream, w, "norm", layer)
        if spec.mask_token is None:
            made["next_states"] = normed if spec.norm_fed_back else stream
        made["logits"] = draft_logits(b, normed, w, spec, checkpoint)
    for binding in names.outputs:
        b.output(binding, made[binding.name])
    w.skip(*_fusing(spec))
    w.finish()
    model = b.model((*how.functions(layer, dtype), *scaled_functions(w)))
    for change in how.passes:
        change(model)
    return model


def _fused(b: GraphBuilder, features: ir.Value, w: Weights, spec: Eagle3Spec) -> ir.Value:
    """[tokens, features] to [tokens, hidden]."""
    if spec.norm_features:
        features = rms_norm(b, features, w, "input_norm", spec.layer)
    if spec.norm_each_feature:
        count = len(spec.features)
        parts = b.ops("Split", features, b.constant([spec.target_hidden] * count), outputs=count, axis=1)
        normed = [rms_norm(b, part, w, f"fc_norm.{at}", spec.layer) for at, part in enumerate(parts)]
        features = b.op("Concat", *normed, axis=1)
    return Linear.stored("fc", spec.layer.hidden)(b, features, w)


def _fusing(spec: Eagle3Spec) -> list[str]:
    """The tensors that ``build_fuse`` reads."""
    each = [f"fc_norm.{at}.weight" for at in range(len(spec.features))] if spec.norm_each_feature else []
    return ["fc.weight", *(["input_norm.weight"] if spec.norm_features else []), *each]


def _prefix(checkpoint: Checkpoint) -> str:
    """What the first layer's tensors are called: SafeAILab and SpecForge write ``midlayer``."""
    if any(name.startswith("midlayer.") for name in checkpoint.tensors):
        return "midlayer"
    if any(name.startswith("layers.0.") for name in checkpoint.tensors):
        return "layers.0"
    raise BadCheckpoint(
        f"{checkpoint.folder}: an EAGLE-3 head should hold tensors 'layers.0.*' or 'midlayer.*', it holds neither"
    )
