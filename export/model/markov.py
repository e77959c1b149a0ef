"""The graph of DSpark's Markov head (arXiv 2607.05147): a block's logits of one token, changed by the token in front.

Its forms are those of DeepSpec and ``speculators``: *vanilla* knows the token in front alone, *gated* weighs it by what
the block made of the place, *rnn* remembers the tokens before it.
"""

import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.draft_vocabulary import draft_logits
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.dspark import DSparkSpec

_TABLE, _SCORES = "markov_head.markov_w1.weight", "markov_head.markov_w2"
_OF_TYPES = {"vanilla": (), "gated": ("markov_head.gate_proj",), "rnn": ("markov_head.joint_proj",)}
_CONFIDENCE = "confidence_head.proj"


def tensors_of(spec: DSparkSpec) -> list[str]:
    """The tensors of the Markov head, and those of the confidence head, which nothing reads."""
    products = [*_OF_TYPES[spec.markov_head_type], _CONFIDENCE]
    return [_TABLE, f"{_SCORES}.weight", *(f"{each}.{kind}" for each in products for kind in ("weight", "bias"))]


def build_markov(spec: DSparkSpec, checkpoint: Checkpoint, *, dtype: str) -> ir.Model:
    """Build the graph of ``contract.markov``. Raises BadCheckpoint for a tensor that is missing or misshapen."""
    names, rank = spec.markov(dtype=dtype), spec.markov_rank
    b = GraphBuilder("markov")
    w = Weights(checkpoint, b, dtype)
    given = {binding.name: b.input(binding) for binding in names.inputs}
    made: dict[str, ir.Value] = {}
    before = b.op("Unsqueeze", given["token_ids"], b.constant([1]))
    word = b.cast(b.op("Gather", w.stored(_TABLE, (spec.vocab, rank)), before), dtype)
    if spec.markov_head_type == "gated":
        gate = Linear.stored("markov_head.gate_proj", rank, bias=True)
        word = b.op("Mul", b.op("Sigmoid", gate(b, b.op("Concat", given["row_states"], word, axis=-1), w)), word)
    elif spec.markov_head_type == "rnn":
        memory = b.op("Unsqueeze", given["memory"], b.constant([1]))
        joint = Linear.stored("markov_head.joint_proj", 3 * rank, bias=True)
        mixed = joint(b, b.op("Concat", memory, word, given["row_states"], axis=-1), w)
        gate, candidate, output = b.ops("Split", mixed, b.constant([rank] * 3), outputs=3, axis=2)
        kept = b.op("Sigmoid", gate)
        new = b.op("Mul", b.op("Sub", b.constant(1, dtype), kept), b.op("Tanh", candidate))
        made["next_memory"] = b.op("Squeeze", b.op("Add", b.op("Mul", kept, memory), new), b.constant([1]))
        word = b.op("Tanh", output)
    changes = draft_logits(b, word, w, spec, checkpoint, _SCORES)
    made["logits"] = b.op("Add", given["row_logits"], changes)
    for binding in names.outputs:
        b.output(binding, made[binding.name])
    return b.model()
