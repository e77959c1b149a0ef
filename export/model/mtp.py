"""The graphs of multi-token prediction (MTP) layers (DeepSeek-AI, "DeepSeek-V3", arXiv 2412.19437).

Each layer reads a token together with a state of the previous token. For the first layer that is the target's last
hidden state after the final norm. For a later layer it is the previous layer's state of that position, one token later.
For drafted tokens beyond the number of layers it is the last layer's own state, after its norm. All of these states
pass one more norm; the graph ``fuse`` applies it to the target's states.
"""

from dataclasses import replace

import onnx_ir as ir

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import CacheKind
from tandemrt.engines.contract.draft_kinds import DRAFT_LAYERS
from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.draft_vocabulary import EMBEDDING, draft_logits
from tandemrt.export.model.layers import decoder_layer, norm_if_present
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.lowerings import STRATEGIES
from tandemrt.export.model.norm import stored_norm
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.mtp import MTP_MODULES, MtpSpec, layer_prefix

_STATE_NORM = "hidden_layernorm"


def build_state_norm(spec: MtpSpec, checkpoint: Checkpoint, *, dtype: str) -> ir.Model:
    """Build the graph of ``contract.fuse``. Raises BadCheckpoint for a tensor that is missing or misshapen."""
    names = contract.fuse(features=spec.feature_width, hidden=spec.layer.hidden, dtype=dtype)
    b = GraphBuilder("fuse")
    features = b.input(names["features"])
    b.output(names["states"], stored_norm(b, features, Weights(checkpoint, b, dtype), _STATE_NORM, spec.layer))
    return b.model()


def build_mtp(
    spec: MtpSpec, checkpoint: Checkpoint, *, dtype: str, capacity: int, lowering: Lowering, at: int = 0
) -> ir.Model:
    """Build the graph of ``contract.draft_head`` of layer ``at``.

    Raises BadCheckpoint, by name, for a tensor that is missing, unused or misshapen.
    """
    strategies, layer = STRATEGIES[lowering], spec.layer
    cache: CacheKind = "paged" if lowering == "paged" else "linear"
    if spec.depth > 1:  # the next layer reads the states of every token
        strategies = replace(strategies, select_rows_early=False)
    names, own = spec.contract(capacity=capacity, dtype=dtype, cache=cache), layer_prefix(at)
    b = GraphBuilder(DRAFT_LAYERS[at])
    w = Weights(checkpoint, b, dtype)
    graph_inputs = {binding.name: b.input(binding) for binding in names.inputs}
    with b.scope("place"):
        attend = strategies.attention(b, layer, graph_inputs, capacity=capacity, dtype=dtype)
    with b.scope("embedding"):
        table = w.stored(EMBEDDING, (layer.vocab, layer.hidden))
        embedded = b.cast(b.op("Gather", table, graph_inputs["token_ids"]), dtype)
        pair = [stored_norm(b, embedded, w, f"{own}token_layernorm", layer), graph_inputs["states"]]
        both = b.op("Concat", *(pair if spec.embedding_first else pair[::-1]), axis=-1)
        stream = Linear.stored(f"{own}input_proj", layer.hidden)(b, both, w)
    name = f"{own}layers.0"
    normed = norm_if_present(b, stream, w, layer, name, layer.norms.before_attention)
    stream, graph_outputs = decoder_layer(b, stream, normed, w, layer, graph_inputs, strategies, attend, 0, name)
    with b.scope("head"):
        if spec.depth == 1 and not strategies.select_rows_early:
            stream = strategies.select_rows(b, stream, graph_inputs["score_rows"])
        last = stored_norm(b, stream, w, f"{own}final_layernorm", layer)
        reader = layer_prefix(min(at + 1, spec.depth - 1))
        graph_outputs["next_states"] = stored_norm(b, last, w, f"{reader}{_STATE_NORM}", layer)
        scored = last if spec.depth == 1 else strategies.select_rows(b, last, graph_inputs["score_rows"])
        graph_outputs["logits"] = draft_logits(b, scored, w, spec, checkpoint)
    for binding in names.outputs:
        b.output(binding, graph_outputs[binding.name])
    w.skip(*_tensors_of_other_graphs(spec, checkpoint, at))
    w.finish()
    return b.model(strategies.functions(layer, dtype))


def _tensors_of_other_graphs(spec: MtpSpec, checkpoint: Checkpoint, at: int) -> list[str]:
    """Return the tensors that the graph of layer ``at`` does not read, its state norm included (see ``fuse``)."""
    others = [layer_prefix(each) for each in range(1, spec.depth) if each != at] + (
        [*MTP_MODULES, "layers.0."] if at else []
    )
    return [name for name in checkpoint.tensors if name.startswith((*others, f"{layer_prefix(at)}{_STATE_NORM}"))]
