"""Logits of a draft over a subset of its target's vocabulary."""

import numpy as np
import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.draft_heads import DraftHeadSpec, target_ids

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head"


def draft_logits(
    b: GraphBuilder, x: ir.Value, w: Weights, spec: DraftHeadSpec, checkpoint: Checkpoint, matmul: str = LM_HEAD
) -> ir.Value:
    """Return [batch, rows, draft_vocab] for ``x`` [batch, rows, …], in the order of the target's token ids.

    ``matmul`` names the weight. Raises BadCheckpoint for inconsistent vocabulary maps.
    """
    logits, ids = Linear.stored(matmul, spec.draft_vocab)(b, x, w), target_ids(checkpoint, spec)
    w.skip("d2t", "t2d")
    if ids is None or (np.diff(ids) > 0).all():
        return logits
    return b.op("Gather", logits, b.constant(np.argsort(ids)), axis=2)  # ties resolve as over the target's ids
