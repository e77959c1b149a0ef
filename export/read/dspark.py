"""What a DSpark checkpoint says (arXiv 2607.05147): a block draft, and a Markov head that draws its tokens one by one.

config.json as ``speculators`` writes it, or flat as DeepSpec and SpecForge do. What its confidence head says, how much
of a window is worth verifying, is not read.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tandemrt.engines import contract
from tandemrt.engines.contract import CacheKind, Contract
from tandemrt.engines.errors import BadCheckpoint
from tandemrt.export.read.dflash import DFlashSpec, read_block
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.spec import ModelSpec

MarkovHeadType = Literal["vanilla", "gated", "rnn"]
_NAMED = ("Qwen3DSparkModel", "DSparkDraftModel")  # DeepSpec, SpecForge
_READ = ("markov_rank", "markov_head_type", "projector_type", "dspark_backbone_conv_enabled")
_UNREAD = (
    *("enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"),
    *("num_anchors", "attention_mode"),  # of training; the numbers of heads say it
)


@dataclass(frozen=True)
class DSparkSpec(DFlashSpec):
    """A block draft whose logits a Markov head of ``markov_rank`` numbers changes by the token in front."""

    markov_head_type: MarkovHeadType
    markov_rank: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelSpec, *, ignored: Collection[str] = ()) -> "DSparkSpec":
        """Read a config. Raises BadCheckpoint, by name, for what is not understood or does not fit ``target``."""
        within = config.get("dflash_config")
        within = within if isinstance(within, Mapping) else {}
        own = Fields({**config, **within}, "config.json")
        kind = own.get("markov_head_type", "vanilla")
        own.only("markov_head_type", *get_args(MarkovHeadType))
        own.only("projector_type", "dspark")
        own.only("dspark_backbone_conv_enabled", False)
        block = read_block(_without(config), target, kind="dspark", named=_NAMED, ignored=ignored)
        if kind == "rnn" and not block.sample_from_anchor:
            raise BadCheckpoint(
                "config.json: sample_from_anchor should be true for markov_head_type 'rnn', it is False: what such a "
                "head remembers of the anchor is not known then; choose another draft"
            )
        values = {field.name: getattr(block, field.name) for field in dataclasses.fields(block)}
        return cls(**values, markov_head_type=kind, markov_rank=own.integer("markov_rank"))

    @property
    def row_states(self) -> int:
        """Numbers of a token of the block that the Markov head reads beside its logits."""
        return 0 if self.markov_head_type == "vanilla" else self.layer.hidden

    def contract(self, *, capacity: int, dtype: str, cache: CacheKind = "linear") -> Contract:
        """Return the bindings of the block, ``capacity`` tokens to a cache row, computing in ``dtype``."""
        sizes = self.sizes(capacity=capacity, dtype=dtype, cache=cache)
        return contract.block(row_states=self.row_states, **sizes)

    def markov(self, *, dtype: str) -> Contract:
        """Return the bindings of the Markov head."""
        memory = self.markov_rank if self.markov_head_type == "rnn" else 0
        return contract.markov(vocab=self.draft_vocab, dtype=dtype, row_states=self.row_states, memory=memory)


def _without(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without what is read here, or known and not read."""
    rest = {name: value for name, value in config.items() if name not in (*_READ, *_UNREAD)}
    if isinstance(rest.get("dflash_config"), Mapping):
        rest["dflash_config"] = _without(rest["dflash_config"])
    return rest
