"""Lowerings: the operators that compute a decoder's attention, chosen by backend and cache layout."""

from typing import Literal

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.recipe.tensorrt import TensorRt, TensorRtRtx
from tandemrt.export.read.spec import ModelSpec

Lowering = Literal["length", "mask", "basic", "grouped", "paged"]

HEAD_DIM_STEP = 16  # GroupQueryAttention on a CPU rotates head sizes that are a multiple of this


def lowering_of(recipe: Recipe) -> Lowering:
    """Return the lowering for the recipe's backend and cache."""
    if recipe.cache == "paged":
        return "paged"
    if isinstance(recipe.backend, TensorRt | TensorRtRtx):
        return recipe.backend.layer_set.lowering
    return "grouped" if recipe.backend.name == "onnxruntime-cpu" else "length"


def supported_lowering(lowering: Lowering, spec: ModelSpec) -> Lowering:
    """Return ``lowering``, or *length* if *grouped* does not support the head size or its rotated part."""
    sizes = (
        *(spec.heads_of(layer).dim for layer in range(spec.layers)),
        *(rope.rotated for layer in range(spec.layers) if (rope := spec.rope_of(layer))),
    )
    return "length" if lowering == "grouped" and any(size % HEAD_DIM_STEP for size in sizes) else lowering
