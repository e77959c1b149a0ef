"""The pipeline of passes of each lowering."""

from collections.abc import Mapping

from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.passes.basic_operators import expand_operators, fold_constants
from tandemrt.export.passes.batch_invariance import make_batch_invariant
from tandemrt.export.passes.deferred_scales import defer_scales
from tandemrt.export.passes.gated_linears import fuse_gated_linears
from tandemrt.export.passes.graph_pass import Pipeline
from tandemrt.export.passes.residual_norms import (
    fuse_lone_norms,
    fuse_residual_norms,
    fuse_wide_norms,
    use_residual_norm_kernel,
)
from tandemrt.export.passes.transposed_matmuls import fuse_transposed_matmuls

PIPELINES: Mapping[Lowering, Pipeline] = {
    "length": Pipeline(),
    "mask": Pipeline(),
    "basic": Pipeline((fold_constants, expand_operators)),
    "grouped": Pipeline((fuse_residual_norms, use_residual_norm_kernel, fuse_transposed_matmuls)),
    "paged": Pipeline((fuse_wide_norms, fuse_residual_norms, defer_scales, fuse_lone_norms, fuse_transposed_matmuls)),
}
# The target of a bundle with backend.batch_invariant, which is paged.
BATCH_INVARIANT = Pipeline(
    (
        *(fuse_wide_norms, fuse_residual_norms, defer_scales, fuse_lone_norms, make_batch_invariant),
        *(fuse_gated_linears, fuse_transposed_matmuls),
    )
)
# Graphs with weights and without decoder layers: ``fuse`` and the Markov head. Other lowerings have no passes for them.
WITHOUT_LAYERS: Mapping[Lowering, Pipeline] = {
    "basic": PIPELINES["basic"],
    "paged": Pipeline((fuse_transposed_matmuls,)),
}
