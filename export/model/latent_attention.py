"""Latent attention with absorbed weights: one cached key per token serves all heads.

A score is query . (up_key @ latent) = (query @ up_key) . latent, so queries are multiplied by the weights of keys, and
the mixed latent vectors by the weights of values (DeepSeek-V2, arXiv 2405.04434, section 2.1). A cached key holds the
rotated part first, then the latent vector, which is also the value.
"""

import onnx_ir as ir

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.graph.builder import GraphBuilder, dims_of, width_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model import dequantized
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.norm import normed
from tandemrt.export.read.latent import Latent
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.export.read.spec import ModelSpec

_EPS = 1e-6  # of the norms of latent vectors, whatever the config's


def latent_projections(
    b: GraphBuilder, x: ir.Value, w: Weights, spec: ModelSpec, latent: Latent, name: str
) -> tuple[ir.Value, ir.Value]:
    """Return queries [..., heads * cached] and keys [..., cached] for ``x`` [..., hidden], before the rotary embedding.

    ``x`` has the tokens of a packed call, or [batch, query] over a linear cache.
    """
    head = latent.plain + latent.rotated
    if latent.query_rank is None:
        query = Linear.stored(f"{name}.q_proj", spec.heads * head)(b, x, w)
    else:
        down = Linear.stored(f"{name}.q_a_proj", latent.query_rank, bias=latent.bias)(b, x, w)
        down = normed(b, down, w(f"{name}.q_a_layernorm.weight", (latent.query_rank,)), w.dtype, _EPS)
        query = Linear.stored(f"{name}.q_b_proj", spec.heads * head)(b, down, w)
    headed = b.op("Reshape", query, b.constant([*_kept(x), spec.heads, head]))
    plain, rotated = b.ops("Split", headed, b.constant([latent.plain, latent.rotated]), outputs=2, axis=-1)
    up_keys, _ = _up_weights(b, w, spec, latent, name)
    query = b.op("Concat", rotated, _per_head(b, plain, up_keys), axis=-1)
    both = Linear.stored(f"{name}.kv_a_proj_with_mqa", latent.cached, bias=latent.bias)(b, x, w)
    vector, key = b.ops("Split", both, b.constant([latent.rank, latent.rotated]), outputs=2, axis=-1)
    vector = normed(b, vector, w(f"{name}.kv_a_layernorm.weight", (latent.rank,)), w.dtype, _EPS)
    flat = b.op("Reshape", query, b.constant([*_kept(x), spec.heads * latent.cached]))
    return flat, b.op("Concat", key, vector, axis=-1)


def latent_outputs(
    b: GraphBuilder, vectors: ir.Value, w: Weights, spec: ModelSpec, latent: Latent, name: str
) -> ir.Value:
    """Return the heads' values [..., heads * value] for their mixed latent vectors [..., heads, rank]."""
    _, up_values = _up_weights(b, w, spec, latent, name)
    values = _per_head(b, vectors, b.op("Transpose", up_values, perm=[0, 2, 1]))
    kept = [0] * (len(dims_of(vectors)) - 2)
    return b.op("Reshape", values, b.constant([*kept, spec.heads * latent.value]))


def _kept(x: ir.Value) -> list[int]:
    """Return what Reshape takes to keep all dimensions of ``x`` but the last."""
    return [0] * (len(dims_of(x)) - 1)


def _up_weights(b: GraphBuilder, w: Weights, spec: ModelSpec, latent: Latent, name: str) -> tuple[ir.Value, ir.Value]:
    """Return the weights from a latent vector to keys [heads, plain, rank] and to values [heads, value, rank]."""
    module, rows = f"{name}.kv_b_proj", spec.heads * (latent.plain + latent.value)
    how = w.quantized(module)
    if how is None:
        weight = w(f"{module}.weight", (rows, latent.rank))
    elif isinstance(how, Scheme) and how.weight == "float8_e4m3fn":
        weight = dequantized.stacked(b, w, (module,), (rows,), latent.rank, how)
    else:
        raise BadCheckpoint(
            f"{module}: latent attention needs this weight unquantized or in float8; write target.dequantize = true"
        )
    headed = b.op("Reshape", weight, b.constant([spec.heads, latent.plain + latent.value, latent.rank]))
    keys, values = b.ops("Split", headed, b.constant([latent.plain, latent.value]), outputs=2, axis=1)
    return keys, values


def _per_head(b: GraphBuilder, x: ir.Value, weights: ir.Value) -> ir.Value:
    """Return [..., heads, out] for ``x`` [..., heads, inner] and ``weights`` [heads, inner, out].

    The matmul of [batch, query] tokens has one more row than tokens, because onnxruntime for CPUs rounds a matmul with
    a single row differently.
    """
    if len(dims_of(x)) == 3:
        product = b.op("MatMul", b.op("Transpose", x, perm=[1, 0, 2]), weights)
        return b.op("Transpose", product, perm=[1, 0, 2])
    headed = b.op("Transpose", x, perm=[0, 2, 1, 3])
    last = b.op("Slice", headed, b.constant([-1]), b.constant([2**31 - 1]), b.constant([2]))
    product = b.op("MatMul", b.op("Concat", headed, last, axis=2), weights)
    product = b.op("Slice", product, b.constant([0]), b.constant([-1]), b.constant([2]))
    result = b.op("Transpose", product, perm=[0, 2, 1, 3])
    result.shape = ir.Shape((*dims_of(x)[:-1], width_of(weights)))  # one row more and one less
    return result
