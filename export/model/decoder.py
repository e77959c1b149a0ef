"""The graph of a target or of a draft model: token ids in, logits of selected rows and an updated KV cache out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import onnx_ir as ir

from tandemrt.engines.contract.contract import CacheKind
from tandemrt.engines.contract.dtypes import COMPUTE
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe, quoted
from tandemrt.export.graph.builder import GraphBuilder, dims_of, width_of
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.embedding import embedded, with_learned_positions
from tandemrt.export.model.experts import optional_inputs_of
from tandemrt.export.model.image_states import with_images
from tandemrt.export.model.layer_inputs import layer_inputs
from tandemrt.export.model.layers import decoder_layers
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.low_bit_matmul import low_bit_functions
from tandemrt.export.model.lowerings import STRATEGIES
from tandemrt.export.model.row_padding import cut, needs_padding, pad_ids
from tandemrt.export.model.scale import scaled_by
from tandemrt.export.model.scaled_matmul import scaled_matmul_functions
from tandemrt.export.model.support import unsupported
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.shard import Shard
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import with_graph_names

LOWEST = {"float32": -3e38, "float16": -6e4, "bfloat16": -3e38}  # finite logit of padding ids, which are never sampled


def build_decoder(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    capacity: int,
    lowering: Lowering,
    kv_dtype: str | None = None,
    width: int | None = None,
    weights_dir: str = "",
    features: Sequence[int] = (),
    uncommitted: int = 2,
    shard: Shard | None = None,
) -> ir.Model:
    """Build the graph whose bindings are ``contract.decoder``.

    ``dtype`` is the compute dtype (float32, float16, bfloat16); tensors stored in another dtype are cast. ``capacity``
    is the number of tokens in a cache row, including the padded tail of the last draft window; a call must keep
    ``write_index + query <= capacity``. ``lowering`` selects the operators of attention: *length* passes the number of
    valid cache entries, *mask* a boolean mask; passes write a *basic* graph, like *mask*, in basic operators; *grouped*
    uses onnxruntime's operator for CPUs; *paged* has a paged cache and the project's own operators, at which the graph
    is cut. All compute the same. ``kv_dtype`` is the dtype of the cache, None the compute dtype; only a paged cache
    holds float8_e4m3fn. ``width`` is the width of the logits, None the model's own. ``weights_dir`` is the future
    folder of the checkpoint's safetensors, relative to the graph file. ``features`` are the layers whose input hidden
    states the graph also outputs, for draft heads that read them.
    ``uncommitted``: see ModelSpec.contract. ``shard``: build the part of one rank; a pass joins the parts
    (export/passes/over_ranks.py). Only rank 0 outputs ``features``; all compute the same rows, because they add them.

    Raises BadCheckpoint, by name, for a tensor that is missing, unused or misshapen, and for a model that the lowering
    does not support (export/model/support.py). Raises BadRecipe for an unknown dtype or lowering.
    """
    _check(spec, dtype, capacity, lowering)
    checkpoint = with_graph_names(checkpoint, spec)
    if shard is not None:
        checkpoint, spec = shard.checkpoint(checkpoint, spec), shard.spec(spec)
    strategies = STRATEGIES[lowering]
    norms_all = spec.layers in features  # the stream after the last norm, of every token
    if norms_all:
        strategies = replace(strategies, select_rows_early=False)
    features = () if shard is not None and shard.rank else features
    cache: CacheKind = "paged" if lowering == "paged" else "linear"
    wide = len(features) * spec.hidden
    sizes: dict[str, Any] = {"capacity": capacity, "dtype": dtype, "cache": cache, "kv_dtype": kv_dtype}
    names = spec.contract(**sizes, width=width, features=wide, uncommitted=uncommitted)
    b = GraphBuilder("decoder")
    w = Weights(checkpoint, b, dtype, weights_dir, scaled_matmuls=strategies.scaled_matmuls)
    graph_inputs = {binding.name: b.input(binding) for binding in names.inputs}

    token_ids, score_rows = graph_inputs["token_ids"], graph_inputs["score_rows"]
    of_tokens = [name for name in ("token_ids", "positions", "image_rows", "image_ends") if name in graph_inputs]
    padded = [each for each in w.low_bit_formats() if needs_padding(each)] if strategies.accepts_padding else []
    with b.scope("place"):
        if strategies.prompts_have_no_logits:
            query = b.op("Shape", token_ids, start=1, end=2)
            graph_inputs |= {name: pad_prompt_to_even(b, graph_inputs, name) for name in of_tokens}
            token_ids = graph_inputs["token_ids"]
        if padded:
            rows = b.op("Shape", score_rows, start=1, end=2)
            graph_inputs |= {name: pad_ids(b, graph_inputs[name], padded, token_ids) for name in of_tokens}
            token_ids = graph_inputs["token_ids"]
            graph_inputs["score_rows"] = pad_ids(b, score_rows, padded)
    with b.scope("embedding"):
        hidden = embedded(b, token_ids, w, "model.embed_tokens", spec.vocab, spec.hidden)
        hidden = scaled_by(b, hidden, spec.scales.embedding, dtype)
        hidden = with_learned_positions(b, hidden, token_ids, w, spec, graph_inputs)
        hidden, updates = with_images(b, hidden, spec, graph_inputs)
        own_inputs = layer_inputs(b, hidden, token_ids, graph_inputs.get("image_rows"), w, spec)
    picked, graph_outputs = decoder_layers(
        b,
        hidden,
        w,
        spec,
        graph_inputs,
        strategies,
        capacity=capacity,
        features=features,
        norms_all=norms_all,
        own_inputs=own_inputs,
        updates=updates,
    )
    if features and strategies.prompts_have_no_logits:
        with b.scope("features"):  # without padding tokens
            graph_outputs["features"] = b.op(
                "Slice", graph_outputs["features"], b.constant([0]), query, b.constant([1])
            )
    with b.scope("head"):
        head = Linear.stored("model.embed_tokens" if spec.tied else "lm_head", spec.vocab, bias=spec.head_bias)
        wanted = spec.vocab if spec.normed_head else min(width or spec.vocab, spec.vocab)
        logits = head.first(b, picked, w, wanted)
        if spec.normed_head:
            rows_of_head = w("lm_head.weight", (spec.vocab, spec.hidden))
            logits = b.op("Div", logits, b.op("ReduceL2", rows_of_head, b.constant([1]), keepdims=0))
        if padded:
            logits = cut(b, logits, rows, score_rows)
        graph_outputs["logits"] = resize_logits(b, scaled_logits(b, logits, spec, dtype), width or spec.vocab, dtype)
    for binding in names.outputs:
        b.output(binding, graph_outputs[binding.name])
    if spec.tied:
        w.same("lm_head.weight", "model.embed_tokens.weight")
    w.finish()
    own_functions = strategies.functions(spec, kv_dtype or dtype)
    functions = (*own_functions, *scaled_matmul_functions(w), *low_bit_functions(w, optional_inputs_of(spec)))
    return b.model(functions)


def scaled_logits(b: GraphBuilder, logits: ir.Value, spec: ModelSpec, dtype: str) -> ir.Value:
    """Apply the model's logit scale and logit softcap, if it has them."""
    if spec.scales.logits != 1.0:
        logits = b.op("Div", logits, b.constant(spec.scales.logits, dtype))
    if not spec.scales.logits_softcap:
        return logits
    cap = b.constant(spec.scales.logits_softcap, dtype)
    return b.op("Mul", b.op("Tanh", b.op("Div", logits, cap)), cap)


def resize_logits(b: GraphBuilder, logits: ir.Value, width: int, dtype: str) -> ir.Value:
    """Pad the logits to ``width``, or cut their padding. No token has a padding id."""
    has = width_of(logits)
    if has > width:
        return b.op("Slice", logits, b.constant([0]), b.constant([width]), b.constant([2]))
    if has == width:
        return logits
    # Derived from the logits: a Shape node would run on the host, and subgraphs run on the GPU only.
    padding = b.op("Mul", b.op("Gather", logits, b.constant([0] * (width - has)), axis=2), b.constant(0.0, dtype))
    return b.op("Concat", logits, b.op("Add", padding, b.constant(LOWEST[dtype], dtype)), axis=2)


def pad_prompt_to_even(b: GraphBuilder, graph_inputs: Mapping[str, ir.Value], name: str) -> ir.Value:
    """Return the input ``name`` [..., batch, query], padded by one token if the call is a prompt chunk of odd length.

    GroupQueryAttention works on tiles of an even number of tokens and rounds a tile of one token differently. Without
    padding, the bits of a prompt would depend on its chunks. The next prompt token overwrites the padding token.
    """
    query, rows = (b.op("Shape", graph_inputs[name], start=1, end=2) for name in ("token_ids", "score_rows"))
    odd = b.op("And", b.cast(b.op("Mod", query, b.constant([2])), "bool"), b.op("Equal", rows, b.constant([0])))
    of_tokens = graph_inputs[name]
    *before, _ = dims_of(of_tokens)
    more = b.op("Slice", of_tokens, b.constant([0]), b.cast(odd, "int64"), b.constant([len(before)]))
    padded = b.op("Concat", of_tokens, more, axis=len(before))
    padded.shape = ir.Shape([*before, "tokens"])  # onnxruntime plans memory by the names
    return padded


def _check(spec: ModelSpec, dtype: str, capacity: int, lowering: Lowering) -> None:
    if dtype not in COMPUTE:
        raise BadRecipe(f"dtype must be one of {', '.join(COMPUTE)}; got {quoted(dtype)}")
    if lowering not in get_args(Lowering):
        raise BadRecipe(f"lowering must be one of {', '.join(get_args(Lowering))}; got {quoted(lowering)}")
    if capacity < 1:
        raise BadRecipe(f"capacity must be at least 1 token; got {quoted(capacity)}")
    if why := unsupported(spec, lowering, capacity):
        raise BadCheckpoint(f"config.json: {why}")
