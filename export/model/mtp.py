"""The graphs of layers that predict tokens further on (DeepSeek-AI, "DeepSeek-V3", arXiv 2412.19437).

A token is fed with the target's last state of the token before it, behind the target's last norm; in a further layer
with what the layer before gives of the place, one token later; a drafted token that is further on than layers go with
the last layer's own state, behind that layer's norm. All of them then pass one more norm, which ``fuse`` is for the
target's.
"""

from dataclasses import replace

import onnx_ir as ir

from tandemrt.engines import contract
from tandemrt.engines.contract import CacheKind
from tandemrt.engines.drafts import DRAFT_LAYERS
from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.draft_vocabulary import EMBEDDING, draft_logits
from tandemrt.export.model.layers import block, normed_by
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.lowerings import STRATEGIES, Lowering
from tandemrt.export.model.norm import rms_norm
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.mtp import OWN, MtpSpec, prefix_of

_STATE_NORM = "hidden_layernorm"


def build_state_norm(spec: MtpSpec, checkpoint: Checkpoint, *, dtype: str) -> ir.Model:
    """Build the graph of ``contract.fuse``. Raises BadCheckpoint for a tensor that is missing or of another shape."""
    names = contract.fuse(features=spec.feature_width, hidden=spec.layer.hidden, dtype=dtype)
    b = GraphBuilder("fuse")
    features = b.input(names["features"])
    b.output(names["states"], rms_norm(b, features, Weights(checkpoint, b, dtype), _STATE_NORM, spec.layer))
    return b.model()


def build_mtp(
    spec: MtpSpec, checkpoint: Checkpoint, *, dtype: str, capacity: int, attention: Lowering, at: int = 0
) -> ir.Model:
    """Build the graph of ``contract.draft_head`` of layer ``at``.

    Raises BadCheckpoint, by name, for a tensor that is missing, unused, or of another shape than the config says.
    """
    how, layer = STRATEGIES[attention], spec.layer
    cache: CacheKind = "paged" if attention == "paged" else "linear"
    if spec.depth > 1:  # states of every token are asked for
        how = replace(how, pick_early=False)
    names, own = spec.contract(capacity=capacity, dtype=dtype, cache=cache), prefix_of(at)
    b = GraphBuilder(DRAFT_LAYERS[at])
    w = Weights(checkpoint, b, dtype)
    given = {binding.name: b.input(binding) for binding in names.inputs}
    with b.scope("place"):
        attend = how.attention(b, layer, given, capacity=capacity, dtype=dtype)
    with b.scope("embedding"):
        table = w.stored(EMBEDDING, (layer.vocab, layer.hidden))
        embedded = b.cast(b.op("Gather", table, given["token_ids"]), dtype)
        pair = [rms_norm(b, embedded, w, f"{own}token_layernorm", layer), given["states"]]
        both = b.op("Concat", *(pair if spec.embedding_first else pair[::-1]), axis=-1)
        stream = Linear.stored(f"{own}input_proj", layer.hidden)(b, both, w)
    name = f"{own}layers.0"
    normed = normed_by(b, stream, w, layer, name, layer.norms.before_attention)
    stream, made = block(b, stream, normed, w, layer, given, how, attend, 0, name)
    with b.scope("head"):
        if spec.depth == 1 and not how.pick_early:
            stream = how.pick(b, stream, given["score_rows"])
        last = rms_norm(b, stream, w, f"{own}final_layernorm", layer)
        reader = prefix_of(min(at + 1, spec.depth - 1))
        made["next_states"] = rms_norm(b, last, w, f"{reader}{_STATE_NORM}", layer)
        scored = last if spec.depth == 1 else how.pick(b, last, given["score_rows"])
        made["logits"] = draft_logits(b, scored, w, spec, checkpoint)
    for binding in names.outputs:
        b.output(binding, made[binding.name])
    w.skip(*_of_others(spec, checkpoint, at))
    w.finish()
    model = b.model(how.functions(layer, dtype))
    for change in how.passes:
        change(model)
    return model


def _of_others(spec: MtpSpec, checkpoint: Checkpoint, at: int) -> list[str]:
    """The tensors that are not read in the graph of layer ``at``: its state's norm, too, which is in front of it."""
    others = [prefix_of(each) for each in range(1, spec.depth) if each != at] + ([*OWN, "layers.0."] if at else [])
    return [name for name in checkpoint.tensors if name.startswith((*others, f"{prefix_of(at)}{_STATE_NORM}"))]
