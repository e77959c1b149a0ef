"""What differs between the lowerings of a decoder; everything else is written once, in export/model/layers.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import onnx_ir as ir

from tandemrt.engines.dtypes import FLOAT8
from tandemrt.engines.recipe import Recipe
from tandemrt.export.model.activation import GatedActivation, one_product, one_product_and_operator, two_products
from tandemrt.export.model.attention import AttentionMaker, LinearCacheAttention
from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.experts import Mixture, branches, one_operator
from tandemrt.export.model.grouped_attention import HEAD_DIM_STEP, GroupedAttention
from tandemrt.export.model.paged_attention import PagedAttention
from tandemrt.export.model.rows import gather_rows, gather_tokens
from tandemrt.export.passes.deferred_scales import defer_scales
from tandemrt.export.passes.products import fuse_transposed_products
from tandemrt.export.passes.residual_norms import fuse_lone_norms, fuse_residual_norms
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.functions import experts, swiglu, window_attention

Lowering = Literal["length", "mask", "grouped", "paged"]


@dataclass(frozen=True)
class Strategies:
    """How a lowering writes the parts of a decoder, and what it makes of the graph afterwards.

    ``pick`` picks the rows that get logits: in front of the last norm, or, ``pick_early``, right behind the last
    attention. ``prompts_score_nothing`` says that a call without rows to score is a prompt's. ``scaled_products``:
    products in float8 are operators of the project. ``functions`` are the bodies behind the other operators of the
    project, for a model and the dtype of its cache; ``passes`` change the graph in place.
    """

    attention: AttentionMaker
    activation: GatedActivation
    mixture: Mixture = field(default=branches, kw_only=True)
    pick: Callable[[GraphBuilder, ir.Value, ir.Value], ir.Value]
    pick_early: bool = False
    prompts_score_nothing: bool = False
    scaled_products: bool = False
    functions: Callable[[ModelSpec, str], tuple[ir.Function, ...]] = lambda _spec, _kv_dtype: ()
    passes: tuple[Callable[[ir.Model], None], ...] = ()


def fitting(attention: Lowering, spec: ModelSpec) -> Lowering:
    """``attention``, or what takes its place for a head, or a rotated part of it, that its operator does not take."""
    sizes = (spec.head_dim, *(rope.rotated for layer in range(spec.layers) if (rope := spec.rope_of(layer))))
    return "length" if attention == "grouped" and any(size % HEAD_DIM_STEP for size in sizes) else attention


def attention_of(recipe: Recipe) -> Lowering:
    """Return the lowering of attention for the recipe's backend: TensorRT's safe one is the mask."""
    if recipe.cache == "paged":
        return "paged"
    if recipe.backend.name == "onnxruntime-cpu":
        return "grouped"
    return "length" if recipe.backend.name.startswith("onnxruntime") else "mask"


def _paged_functions(spec: ModelSpec, kv_dtype: str) -> tuple[ir.Function, ...]:
    per_head = spec.qk_norm is not None and not spec.qk_norm.over_all_heads
    activation = (swiglu(),) if spec.gated and spec.activation == "silu" else ()
    mixture = (experts(),) if spec.experts is not None else ()
    return window_attention(qk_norm=per_head, float8=kv_dtype == FLOAT8), *activation, *mixture


STRATEGIES: Mapping[Lowering, Strategies] = {
    "length": Strategies(LinearCacheAttention.by_length, two_products, gather_rows),
    "mask": Strategies(LinearCacheAttention.by_mask, two_products, gather_rows),
    "grouped": Strategies(
        GroupedAttention.in_place,
        one_product,
        gather_rows,
        pick_early=True,
        prompts_score_nothing=True,
        passes=(fuse_residual_norms, fuse_transposed_products),
    ),
    "paged": Strategies(
        PagedAttention.over_blocks,
        one_product_and_operator,
        gather_tokens,
        pick_early=True,
        mixture=one_operator,
        scaled_products=True,
        functions=_paged_functions,
        passes=(fuse_residual_norms, defer_scales, fuse_lone_norms),
    ),
}
