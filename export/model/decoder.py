"""The graph of a target or of an independent draft model: tokens in, logits of chosen rows and an updated cache out."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import onnx_ir as ir

from tandemrt.engines.contract import CacheKind
from tandemrt.engines.dtypes import COMPUTE
from tandemrt.engines.errors import BadCheckpoint, BadRecipe, quoted
from tandemrt.export.model.builder import GraphBuilder, dims_of, width_of
from tandemrt.export.model.int4_product import int4_functions
from tandemrt.export.model.layers import stack, times
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.lowerings import STRATEGIES, Lowering
from tandemrt.export.model.scaled_product import scaled_functions
from tandemrt.export.model.support import unsupported
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import named

LOWEST = {"float32": -3e38, "float16": -6e4, "bfloat16": -3e38}  # a logit that is never chosen, and finite


def build_decoder(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    capacity: int,
    attention: Lowering,
    kv_dtype: str | None = None,
    width: int | None = None,
    weights_dir: str = "",
    features: Sequence[int] = (),
) -> ir.Model:
    """Build the graph whose bindings are ``contract.decoder``.

    ``dtype`` is the compute dtype (float32, float16, bfloat16); tensors stored otherwise are cast. ``capacity`` is
    the number of tokens a cache row holds, slack for the padded tail of the last window included: a row must keep
    ``write_index + query <= capacity``. ``attention`` is the lowering: *length* tells the operator how many cache
    entries count, *mask* gives it a boolean mask, *grouped* runs onnxruntime's operator for CPUs, *paged* has a
    paged cache and operators of the project's own, to be cut at; all compute the same. ``kv_dtype`` is what the cache
    holds, None the compute dtype; only a paged one holds float8_e4m3fn. ``width`` is that of the logits,
    None the model's own. ``weights_dir`` is the folder, relative to the graph file, where the checkpoint's safetensors
    will lie. ``features`` are layers whose inputs the graph gives for every token: what a draft head reads.

    Raises BadCheckpoint, by name, for a tensor that is missing, unused, or of another shape than the config says,
    and for what the lowering does not do (export/model/support.py); BadRecipe for an unknown dtype or lowering.
    """
    _check(spec, dtype, capacity, attention)
    how = STRATEGIES[attention]
    cache: CacheKind = "paged" if attention == "paged" else "linear"
    wide = len(features) * spec.hidden
    sizes: dict[str, Any] = {"capacity": capacity, "dtype": dtype, "cache": cache, "kv_dtype": kv_dtype}
    names = spec.contract(**sizes, width=width, features=wide)
    b = GraphBuilder("decoder")
    w = Weights(named(checkpoint, spec), b, dtype, weights_dir, scaled_products=how.scaled_products)
    given = {binding.name: b.input(binding) for binding in names.inputs}

    if how.prompts_score_nothing:
        with b.scope("place"):
            query = b.op("Shape", given["token_ids"], start=1, end=2)
            given["token_ids"] = even_prompt(b, given)
    with b.scope("embedding"):
        table = w.stored("model.embed_tokens.weight", (spec.vocab, spec.hidden))
        hidden = b.cast(b.op("Gather", table, given["token_ids"]), dtype)
        hidden = times(b, hidden, spec.scales.embedding, dtype)
    picked, made = stack(b, hidden, w, spec, given, how, capacity=capacity, features=features)
    if features and how.prompts_score_nothing:
        with b.scope("features"):  # the token that made a prompt's number even is nobody's
            made["features"] = b.op("Slice", made["features"], b.constant([0]), query, b.constant([1]))
    with b.scope("head"):
        head = Linear.stored("model.embed_tokens" if spec.tied else "lm_head", spec.vocab)
        made["logits"] = as_wide(b, scaled_logits(b, head(b, picked, w), spec, dtype), width or spec.vocab, dtype)
    for binding in names.outputs:
        b.output(binding, made[binding.name])
    if spec.tied:
        w.same("lm_head.weight", "model.embed_tokens.weight")
    w.finish()
    functions = (*how.functions(spec, kv_dtype or dtype), *scaled_functions(w), *int4_functions(w))
    model = b.model(functions)
    for change in how.passes:
        change(model)
    return model


def scaled_logits(b: GraphBuilder, logits: ir.Value, spec: ModelSpec, dtype: str) -> ir.Value:
    """The logits divided and bounded, where the model does so."""
    if spec.scales.logits != 1.0:
        logits = b.op("Div", logits, b.constant(spec.scales.logits, dtype))
    if not spec.scales.logits_softcap:
        return logits
    cap = b.constant(spec.scales.logits_softcap, dtype)
    return b.op("Mul", b.op("Tanh", b.op("Div", logits, cap)), cap)


def as_wide(b: GraphBuilder, logits: ir.Value, width: int, dtype: str) -> ir.Value:
    """Logits of another ``width``, for the same tokens: what is missing or too much is padding, which no token has."""
    has = width_of(logits)
    if has > width:
        return b.op("Slice", logits, b.constant([0]), b.constant([width]), b.constant([2]))
    if has == width:
        return logits
    # Shaped like logits by being made of them: a shape would be computed on the host, and pieces run on a GPU alone.
    padding = b.op("Mul", b.op("Gather", logits, b.constant([0] * (width - has)), axis=2), b.constant(0.0, dtype))
    return b.op("Concat", logits, b.op("Add", padding, b.constant(LOWEST[dtype], dtype)), axis=2)


def even_prompt(b: GraphBuilder, given: Mapping[str, ir.Value]) -> ir.Value:
    """The tokens of the call; where none is scored, so in a prompt, an odd number is made even by one more.

    GroupQueryAttention works on tiles of an even number of tokens (twice the head size, or what the second-level cache
    holds), and a tile of one token is rounded in another way: a prompt's bits would depend on where it was cut. The
    token more is written where the prompt's next one will be.
    """
    query, rows = (b.op("Shape", given[name], start=1, end=2) for name in ("token_ids", "score_rows"))
    odd = b.op("And", b.cast(b.op("Mod", query, b.constant([2])), "bool"), b.op("Equal", rows, b.constant([0])))
    more = b.op("Slice", given["token_ids"], b.constant([0]), b.cast(odd, "int64"), b.constant([1]))
    tokens = b.op("Concat", given["token_ids"], more, axis=1)
    tokens.shape = ir.Shape([dims_of(given["token_ids"])[0], "tokens"])  # onnxruntime plans memory by the names
    return tokens


def _check(spec: ModelSpec, dtype: str, capacity: int, attention: Lowering) -> None:
    if dtype not in COMPUTE:
        raise BadRecipe(f"dtype should be one of {', '.join(COMPUTE)}, it is {quoted(dtype)}")
    if attention not in get_args(Lowering):
        raise BadRecipe(f"attention should be one of {', '.join(get_args(Lowering))}, it is {quoted(attention)}")
    if capacity < 1:
        raise BadRecipe(f"capacity should be at least 1 token, it is {quoted(capacity)}")
    if why := unsupported(spec, attention, capacity):
        raise BadCheckpoint(f"config.json: {why}")
