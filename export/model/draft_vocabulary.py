"""Logits of a draft that knows a part of its target's vocabulary."""

import numpy as np
import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.heads import HeadSpec, target_ids

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head"


def target_logits(
    b: GraphBuilder,
    x: ir.Value,
    w: Weights,
    spec: HeadSpec,
    checkpoint: Checkpoint,
    dtype: str,
    product: str = LM_HEAD,
) -> ir.Value:
    """[batch, rows, …] to [batch, rows, vocab] by ``product``, as wide as the target's: -inf for a token that is not
    known.

    Raises BadCheckpoint for maps of the vocabulary that do not hold together.
    """
    logits, ids = Linear.stored(product, spec.draft_vocab)(b, x, w), target_ids(checkpoint, spec)
    w.skip("d2t", "t2d")
    if ids is None:
        return logits
    place, barred = np.zeros(spec.vocab, np.int64), np.full(spec.vocab, float("-inf"))
    place[ids], barred[ids] = np.arange(len(ids)), 0
    return b.op("Add", b.op("Gather", logits, b.constant(place), axis=2), b.constant(barred, dtype))
