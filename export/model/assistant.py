"""The graph of a Gemma 4 assistant, from transformers' published code.

A step reads the embedding of the newest token and a state: the target's last one, after its norm, then the one that
the step before computed. Its layers only have queries, at the position of the text's newest token. They read the
target's keys and values of all tokens before it.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tandemrt.engines.contract.contract import CacheKind
from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.draft_vocabulary import EMBEDDING
from tandemrt.export.model.grouped_attention import GroupedAttention
from tandemrt.export.model.layers import decoder_layers
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.lowerings import STRATEGIES
from tandemrt.export.model.paged_attention import PagedAttention
from tandemrt.export.model.scale import scaled_by
from tandemrt.export.read.assistant import TOKEN_ORDERING, AssistantSpec, token_groups
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec

_TABLE = "model.embed_tokens"


def build_assistant(
    spec: AssistantSpec, checkpoint: Checkpoint, *, dtype: str, capacity: int, lowering: Lowering
) -> ir.Model:
    """Build the graph of ``contract.assistant``.

    Raises BadCheckpoint, by name, for a tensor that is missing, unused or misshapen.
    """
    cache: CacheKind = "paged" if lowering == "paged" else "linear"
    layer, names = spec.layer, spec.contract(capacity=capacity, dtype=dtype, cache=cache)
    b = GraphBuilder("draft")
    w = Weights(checkpoint, b, dtype)
    graph_inputs = {binding.name: b.input(binding) for binding in names.inputs}
    read_as = {
        f"{kind}.{source}": f"{kind}.{layer.layers + source}"  # see Variants.sources
        for source, _ in spec.caches
        for kind in ("key", "value")
    }
    for stored, name in read_as.items():
        graph_inputs[f"past_{name}"] = graph_inputs[f"present_{name}"] = graph_inputs[f"past_{stored}"]
    with b.scope("embedding"):
        table = w.stored(EMBEDDING, (layer.vocab, spec.target_hidden))
        word = b.cast(b.op("Gather", table, graph_inputs["token_ids"]), dtype)
        both = b.op("Concat", scaled_by(b, word, spec.embedding_scale, dtype), graph_inputs["states"], axis=-1)
        stream = Linear.stored("pre_projection", layer.hidden)(b, both, w)
    normed, present = decoder_layers(
        b,
        stream,
        w,
        layer,
        graph_inputs,
        replace(STRATEGIES[lowering], attention=_over_earlier_blocks if lowering == "paged" else _over_earlier_rows),
        capacity=capacity,
        features=(),
        norms_all=False,
        own_inputs=(),
        updates=(),
    )
    with b.scope("head"):
        # A text of one token has no keys to read, so its drafts must not depend on what the cache held.
        has_earlier = b.cast(b.op("Greater", graph_inputs["write_index"], b.constant([0])), dtype)
        normed = b.op("Mul", normed, b.op("Unsqueeze", has_earlier, b.constant([1, 2])))
        graph_outputs = {f"present_{stored}": present[f"present_{name}"] for stored, name in read_as.items()}
        graph_outputs["next_states"] = Linear.stored("post_projection", spec.target_hidden)(b, normed, w)
        if spec.centroids:
            graph_outputs["logits"] = _logits_of_groups(b, normed, w, spec, token_groups(checkpoint, spec))
        else:
            graph_outputs["logits"] = Linear.stored(_TABLE, spec.draft_vocab)(b, normed, w)
    for binding in names.outputs:
        b.output(binding, graph_outputs[binding.name])
    w.same("lm_head.weight", f"{_TABLE}.weight")
    w.finish()
    return b.model(STRATEGIES[lowering].functions(layer, dtype))


def _over_earlier_rows(
    b: GraphBuilder, spec: ModelSpec, graph_inputs: Mapping[str, ir.Value], *, capacity: int, dtype: str
) -> GroupedAttention:
    """Return attention of queries at ``write_index`` over the entries before it."""
    attention = GroupedAttention.in_place(b, spec, graph_inputs, capacity=capacity, dtype=dtype)
    last = _position_before(b, graph_inputs)
    most = b.op("Add", b.op("ReduceMax", last, keepdims=1), b.constant([1]))
    return replace(attention, seqlens_k=b.cast(last, "int32"), total_sequence_length=b.cast(most, "int32"))


def _over_earlier_blocks(
    b: GraphBuilder, spec: ModelSpec, graph_inputs: Mapping[str, ir.Value], *, capacity: int, dtype: str
) -> PagedAttention:
    """Return the same over a paged cache: for the operator queries are one position earlier, and so are angles."""
    earlier = {**graph_inputs, "write_index": _position_before(b, graph_inputs)}
    return PagedAttention.over_blocks(b, spec, earlier, capacity=capacity, dtype=dtype, first_angle=1)


def _position_before(b: GraphBuilder, graph_inputs: Mapping[str, ir.Value]) -> ir.Value:
    last = b.op("Max", b.op("Sub", graph_inputs["write_index"], b.constant([1])), b.constant([0]))
    last.shape = graph_inputs["write_index"].shape
    return last


def _logits_of_groups(
    b: GraphBuilder, x: ir.Value, w: Weights, spec: AssistantSpec, tokens_of: npt.NDArray[np.int64]
) -> ir.Value:
    """Return the logits of the tokens of the likeliest groups; others get less than the least of them.

    ``tokens_of``: the tokens of each group.
    """
    vocab = spec.draft_vocab
    w.skip(TOKEN_ORDERING)
    scores = b.cast(Linear.stored("masked_embedding.centroids", spec.centroids)(b, x, w), "float32")
    _, groups = b.ops("TopK", scores, b.constant([spec.active]), outputs=2)
    ids = b.op("Reshape", b.op("Gather", b.constant(tokens_of), groups), b.constant([0, 0, -1]))
    rows = b.op("Gather", w.stored(f"{_TABLE}.weight", (vocab, spec.layer.hidden)), ids)
    products = b.op("Mul", b.cast(rows, "float32"), b.cast(b.op("Unsqueeze", x, b.constant([2])), "float32"))
    logits = b.op("ReduceSum", products, b.constant([-1]), keepdims=0)
    least = b.op("Sub", b.op("ReduceMin", logits, b.constant([-1])), b.constant(1.0, "float32"))
    others = b.op("Add", least, b.op("ConstantOfShape", b.constant([vocab])))  # a Shape node would run on the host
    return b.cast(b.op("ScatterElements", others, ids, logits, axis=2), w.dtype)
