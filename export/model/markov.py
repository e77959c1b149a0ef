"""The graph of DSpark's Markov head (arXiv 2607.05147), which adds to a block draft's logits a bias by previous token.

The variants are those of DeepSpec and ``speculators``: *vanilla* reads the previous token, *gated* also gates it by the
draft's state at this position, *rnn* carries a recurrent state over the previous tokens.
"""

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.draft_vocabulary import draft_logits
from tandemrt.export.model.linear import Linear
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.dspark import DSparkSpec

_TABLE, _SCORES = "markov_head.markov_w1.weight", "markov_head.markov_w2"


def build_markov(spec: DSparkSpec, checkpoint: Checkpoint, *, dtype: str) -> ir.Model:
    """Build the graph of ``contract.markov``. Raises BadCheckpoint for a tensor that is missing or misshapen."""
    names, rank = spec.markov(dtype=dtype), spec.markov_rank
    b = GraphBuilder("markov")
    w = Weights(checkpoint, b, dtype)
    graph_inputs = {binding.name: b.input(binding) for binding in names.inputs}
    graph_outputs: dict[str, ir.Value] = {}
    before = b.op("Unsqueeze", graph_inputs["token_ids"], b.constant([1]))
    word = b.cast(b.op("Gather", w.stored(_TABLE, (spec.vocab, rank)), before), dtype)
    if spec.markov_head_type == "gated":
        gate = Linear.stored("markov_head.gate_proj", rank, bias=True)
        word = b.op("Mul", b.op("Sigmoid", gate(b, b.op("Concat", graph_inputs["row_states"], word, axis=-1), w)), word)
    elif spec.markov_head_type == "rnn":
        memory = b.op("Unsqueeze", graph_inputs["memory"], b.constant([1]))
        joint = Linear.stored("markov_head.joint_proj", 3 * rank, bias=True)
        mixed = joint(b, b.op("Concat", memory, word, graph_inputs["row_states"], axis=-1), w)
        gate, candidate, output = b.ops("Split", mixed, b.constant([rank] * 3), outputs=3, axis=2)
        kept = b.op("Sigmoid", gate)
        new = b.op("Mul", b.op("Sub", b.constant(1, dtype), kept), b.op("Tanh", candidate))
        graph_outputs["next_memory"] = b.op("Squeeze", b.op("Add", b.op("Mul", kept, memory), new), b.constant([1]))
        word = b.op("Tanh", output)
    changes = draft_logits(b, word, w, spec, checkpoint, _SCORES)
    graph_outputs["logits"] = b.op("Add", graph_inputs["row_logits"], changes)
    for binding in names.outputs:
        b.output(binding, graph_outputs[binding.name])
    return b.model()
