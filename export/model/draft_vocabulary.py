"""Logits of a draft that may know a part of its target's vocabulary."""

import numpy as np
import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.heads import HeadSpec, target_ids

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head"


def draft_logits(
    b: GraphBuilder, x: ir.Value, w: Weights, spec: HeadSpec, checkpoint: Checkpoint, product: str = LM_HEAD
) -> ir.Value:
    """[batch, rows, …] to [batch, rows, draft_vocab] by ``product``, in the order of the target's ids.

    Raises BadCheckpoint for maps of the vocabulary that do not hold together.
    """
    logits, ids = Linear.stored(product, spec.draft_vocab)(b, x, w), target_ids(checkpoint, spec)
    w.skip("d2t", "t2d")
    if ids is None or (np.diff(ids) > 0).all():
        return logits
    return b.op("Gather", logits, b.constant(np.argsort(ids)), axis=2)  # so that of equal ones the same token is first
