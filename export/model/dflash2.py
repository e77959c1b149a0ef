"""The graphs of a DFlash2 draft: a DFlash block with convolutions around its sublayers, and a selector of tokens.

The definitions are those of ``speculators`` and of z-lab's published code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.dflash import build_dflash
from tandemrt.export.model.linear import Linear
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.dflash2 import SELECTOR, DFlash2Spec


@dataclass(frozen=True)
class BlockConvolutions:
    """Causal convolutions over the tokens of a draft block, before and after each sublayer (see Around in layers.py).

    A weight is the sum of a stored one per channel and one per group of ``group`` channels, which follows from the
    normed input of the sublayer at the token. Tokens before the block count as zeros.
    """

    hidden: int
    block: int
    taps: int
    group: int

    def __call__(
        self, b: GraphBuilder, normed: ir.Value, w: Weights, name: str
    ) -> tuple[ir.Value, Callable[[ir.Value], ir.Value]]:
        width = 2 * self.taps * (self.hidden // self.group)
        own = Linear.stored(f"{name}.kernel_projection", width)(b, normed, w)
        return self._convolved(b, normed, own, w, name, 0), lambda output: self._convolved(b, output, own, w, name, 1)

    def _convolved(self, b: GraphBuilder, x: ir.Value, own: ir.Value, w: Weights, name: str, side: int) -> ir.Value:
        """Return the convolution of ``x`` by its ``side`` of the weights; ``own`` [..., width]: those of the tokens.

        Both have the shape of the stream. No other value is used on both sides of attention, where a graph is cut.
        """
        taps, groups = self.taps, self.hidden // self.group
        stored = w(f"{name}.base_kernel", (2, taps, self.hidden))
        bases = b.op("Reshape", stored, b.constant([2 * taps, groups, self.group]))
        kernels = b.op("Reshape", own, b.constant([-1, self.block, 2 * taps, groups, 1]))
        tokens, total = b.op("Reshape", x, b.constant([-1, self.block, groups, self.group])), None
        for tap in range(taps):
            at = b.constant(side * taps + tap)
            weight = b.op("Add", b.op("Gather", bases, at, axis=0), b.op("Gather", kernels, at, axis=2))
            values = tokens
            if tap:  # as Pad, which no GPU has in bfloat16
                place = np.arange(self.block) - tap
                earlier = b.op("Gather", tokens, b.constant(np.maximum(place, 0)), axis=1)
                exists = (place >= 0).reshape(-1, 1, 1)
                values = b.op("Mul", earlier, b.constant(exists.astype(np.float32), w.dtype))
            product = b.op("Mul", values, weight)
            total = product if total is None else b.op("Add", total, product)
        convolved = b.op("Reshape", total, b.op("Shape", x))
        convolved.shape = x.shape
        return convolved


def build_dflash2(
    spec: DFlash2Spec, checkpoint: Checkpoint, *, dtype: str, capacity: int, lowering: Lowering
) -> ir.Model:
    """Build the graph of ``contract.block``; see build_dflash."""
    around = BlockConvolutions(spec.layer.hidden, spec.block_size, spec.taps, spec.group)
    return build_dflash(spec, checkpoint, dtype=dtype, capacity=capacity, lowering=lowering, around=around)


def build_selector(spec: DFlash2Spec, checkpoint: Checkpoint, *, dtype: str) -> ir.Model:
    """Build the graph of ``contract.markov``: scores of a row's most likely tokens, given the token before.

    All other tokens get −inf. Raises BadCheckpoint for a tensor that is missing or misshapen.
    """
    names, rank = spec.markov(dtype=dtype), spec.rank
    b = GraphBuilder("markov")
    w = Weights(checkpoint, b, dtype)
    graph_inputs = {binding.name: b.input(binding) for binding in names.inputs}
    before, after = (
        w.stored(f"{SELECTOR}.{kind}_codebook", (spec.vocab, rank)) for kind in ("predecessor", "successor")
    )
    state = Linear.stored(f"{SELECTOR}.hidden_projection", rank)(b, graph_inputs["row_states"], w)
    word = b.cast(b.op("Gather", before, b.op("Unsqueeze", graph_inputs["token_ids"], b.constant([1]))), dtype)
    context = b.op("Unsqueeze", b.cast(b.op("Mul", word, state), "float32"), b.constant([2]))
    row = b.cast(graph_inputs["row_logits"], "float32")
    likely, ids = b.ops("TopK", row, b.constant([spec.candidates]), outputs=2)
    pairs = b.op("Mul", b.cast(b.op("Gather", after, ids), "float32"), context)
    scores = b.op("Add", likely, b.op("ReduceSum", pairs, b.constant([-1]), keepdims=0))
    others = b.op("Expand", b.constant(float("-inf"), "float32"), b.op("Shape", row))
    logits = b.cast(b.op("ScatterElements", others, ids, scores, axis=2), dtype)
    for binding in names.outputs:
        b.output(binding, logits)
    return b.model()
