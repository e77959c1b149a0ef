"""Read the config of a DSpark checkpoint (arXiv 2607.05147): a block draft with a Markov head.

The Markov head samples the tokens of the block one by one. config.json has the form of ``speculators``, or the flat
form of DeepSpec and SpecForge. The confidence head, which predicts how many drafted tokens are worth verifying, is not
read.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import CacheKind, Contract
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.dflash import DFlashSpec, flat_fields, read_block_draft, without_fields
from tandemrt.export.read.spec import ModelSpec

MarkovHeadType = Literal["vanilla", "gated", "rnn"]
_NAMED = ("Qwen3DSparkModel", "DSparkDraftModel")  # DeepSpec, SpecForge
_READ = ("markov_rank", "markov_head_type", "projector_type", "dspark_backbone_conv_enabled")
_UNREAD = (
    *("enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"),
    *("num_anchors", "attention_mode"),  # training only; the numbers of attention heads imply attention_mode
)

# Matmuls of the Markov head besides its two tables.
_MATMULS = {"vanilla": (), "gated": ("markov_head.gate_proj",), "rnn": ("markov_head.joint_proj",)}


@dataclass(frozen=True)
class DSparkSpec(DFlashSpec):
    """A block draft with a Markov head of rank ``markov_rank``, which adjusts logits by the previous token."""

    markov_head_type: MarkovHeadType
    markov_rank: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelSpec, *, ignored: Collection[str] = ()) -> "DSparkSpec":
        """Read a config. Raises BadCheckpoint, by name, for unknown fields and values that do not fit ``target``."""
        own = flat_fields(config)
        kind = own.get("markov_head_type", "vanilla")
        own.only("markov_head_type", *get_args(MarkovHeadType))
        own.only("projector_type", "dspark")
        own.only("dspark_backbone_conv_enabled", False)
        rest = without_fields(config, (*_READ, *_UNREAD))
        block = read_block_draft(rest, target, kind="dspark", from_anchor=True, named=_NAMED, ignored=ignored)
        if kind == "rnn" and not block.sample_from_anchor:
            raise BadCheckpoint(
                "config.json: sample_from_anchor should be true for markov_head_type 'rnn', it is False: the head's "
                "memory of the anchor is undefined then; choose another draft"
            )
        values = {field.name: getattr(block, field.name) for field in dataclasses.fields(block)}
        return cls(**values, markov_head_type=kind, markov_rank=own.integer("markov_rank"))

    @property
    def row_states(self) -> int:
        """The width of the hidden state per block token that the Markov head reads in addition to the logits."""
        return 0 if self.markov_head_type == "vanilla" else self.layer.hidden

    @property
    def further_tensors(self) -> tuple[str, ...]:
        """The tensors of the Markov head, and those of the confidence head, which no graph reads."""
        matmuls = (*_MATMULS[self.markov_head_type], "confidence_head.proj")
        tables = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
        return (*tables, *(f"{matmul}.{kind}" for matmul in matmuls for kind in ("weight", "bias")))

    def contract(self, *, capacity: int, dtype: str, cache: CacheKind = "linear") -> Contract:
        """Return the bindings of the block, ``capacity`` tokens to a cache row, computing in ``dtype``."""
        sizes = self.sizes(capacity=capacity, dtype=dtype, cache=cache)
        return contract.block(row_states=self.row_states, **sizes)

    def markov(self, *, dtype: str) -> Contract:
        """Return the bindings of the Markov head."""
        memory = self.markov_rank if self.markov_head_type == "rnn" else 0
        return contract.markov(vocab=self.draft_vocab, dtype=dtype, row_states=self.row_states, memory=memory)
