"""The graphs of a layer that predicts tokens further on (DeepSeek-AI, "DeepSeek-V3", arXiv 2412.19437).

A token is fed with the target's last state of the token before it, behind the target's last norm; a drafted one with
the layer's own, behind the layer's. Both then pass one more norm, which ``fuse`` is for the target's.
"""

import onnx_ir as ir

from tandemrt.engines import contract
from tandemrt.engines.contract import CacheKind
from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.draft_vocabulary import EMBEDDING, draft_logits
from tandemrt.export.model.layers import block, normed_by
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.lowerings import STRATEGIES, Lowering
from tandemrt.export.model.norm import rms_norm
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.mtp import MtpSpec

_STATE_NORM = "hidden_layernorm"


def build_state_norm(spec: MtpSpec, checkpoint: Checkpoint, *, dtype: str) -> ir.Model:
    """Build the graph of ``contract.fuse``. Raises BadCheckpoint for a tensor that is missing or of another shape."""
    names = contract.fuse(features=spec.feature_width, hidden=spec.layer.hidden, dtype=dtype)
    b = GraphBuilder("fuse")
    features = b.input(names["features"])
    b.output(names["states"], rms_norm(b, features, Weights(checkpoint, b, dtype), _STATE_NORM, spec.layer))
    return b.model()


def build_mtp(spec: MtpSpec, checkpoint: Checkpoint, *, dtype: str, capacity: int, attention: Lowering) -> ir.Model:
    """Build the graph of ``contract.draft_head``.

    Raises BadCheckpoint, by name, for a tensor that is missing, unused, or of another shape than the config says.
    """
    how, layer = STRATEGIES[attention], spec.layer
    cache: CacheKind = "paged" if attention == "paged" else "linear"
    names = spec.contract(capacity=capacity, dtype=dtype, cache=cache)
    b = GraphBuilder("draft")
    w = Weights(checkpoint, b, dtype)
    given = {binding.name: b.input(binding) for binding in names.inputs}
    with b.scope("place"):
        attend = how.attention(b, layer, given, capacity=capacity, dtype=dtype)
    with b.scope("embedding"):
        table = w.stored(EMBEDDING, (layer.vocab, layer.hidden))
        embedded = b.cast(b.op("Gather", table, given["token_ids"]), dtype)
        pair = [rms_norm(b, embedded, w, "token_layernorm", layer), given["states"]]
        both = b.op("Concat", *(pair if spec.embedding_first else pair[::-1]), axis=-1)
        stream = Linear.stored("input_proj", layer.hidden)(b, both, w)
    normed = normed_by(b, stream, w, layer, "layers.0", layer.norms.before_attention)
    stream, made = block(b, stream, normed, w, layer, given, how, attend, 0, "layers.0")
    with b.scope("head"):
        if not how.pick_early:
            stream = how.pick(b, stream, given["score_rows"])
        last = rms_norm(b, stream, w, "final_layernorm", layer)
        made["logits"] = draft_logits(b, last, w, spec, checkpoint)
        made["next_states"] = rms_norm(b, last, w, _STATE_NORM, layer)
    for binding in names.outputs:
        b.output(binding, made[binding.name])
    w.finish()
    model = b.model(how.functions(layer, dtype))
    for change in how.passes:
        change(model)
    return model
