"""Lowerings: the operators that compute a decoder's attention. The backend of a recipe chooses one."""

from tandemrt.engines.recipe.backend import Lowering as Lowering
from tandemrt.export.read.spec import ModelSpec

HEAD_DIM_STEP = 16  # GroupQueryAttention on a CPU rotates head sizes that are a multiple of this


def supported_lowering(lowering: Lowering, spec: ModelSpec) -> Lowering:
    """Return ``lowering``, or *length* if *grouped* does not support the head size or its rotated part."""
    sizes = (
        *(spec.heads_of(layer).dim for layer in range(spec.layers)),
        *(rope.rotated for layer in range(spec.layers) if (rope := spec.rope_of(layer))),
    )
    return "length" if lowering == "grouped" and any(size % HEAD_DIM_STEP for size in sizes) else lowering
