"""Read the config of a DFlash2 checkpoint: a block draft with convolutions within the block and a selector of tokens.

config.json has the form of ``speculators``, or the flat form of z-lab.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import CacheKind, Contract
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.dflash import DFlashSpec, flat_fields, read_block_draft, without_fields
from tandemrt.export.read.spec import ModelSpec

SELECTOR = "candidate_selector"
_NAMED = ("DFlash2DraftModel",)
_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Fields of the flat form that scale embeddings and logits.
_UNCHANGED: Mapping[str, Any] = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}


@dataclass(frozen=True)
class DFlash2Spec(DFlashSpec):
    """A block draft whose tokens are chosen in sequence among the most likely ones of their rows.

    ``taps``: tokens of the block that each convolution reads. ``group``: channels that share the part of its weights
    that follows from the token. ``rank`` and ``candidates``: of the selector.
    """

    taps: int
    group: int
    rank: int
    candidates: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelSpec, *, ignored: Collection[str] = ()) -> "DFlash2Spec":
        """Read a config. Raises BadCheckpoint, by name, for unknown fields and values that do not fit ``target``."""
        own = flat_fields(config)
        for name, value in _UNCHANGED.items():
            own.only(name, value)
        rest = without_fields(config, (*_SIZES, *_UNCHANGED))
        if "speculators_model_type" in rest:
            rest = {"sliding_window_non_causal": True, **rest}
        block = read_block_draft(rest, target, kind="dflash2", from_anchor=False, named=_NAMED, ignored=ignored)
        taps, group, rank, candidates = (own.integer(name) for name in _SIZES)
        hidden = block.layer.hidden
        for name, rule, wrong in (
            ("draft_vocab_size", f"the target's vocab_size, {block.vocab}", block.draft_vocab != block.vocab),
            ("sample_from_anchor", "false", block.sample_from_anchor),
            ("conv_kernel_size", f"at most block_size, {block.block_size}", taps > block.block_size),
            ("conv_group_size", f"a divisor of hidden_size, {hidden}", hidden % group > 0),
            ("selector_top_k", f"at most vocab_size, {block.vocab}", candidates > block.vocab),
        ):
            if wrong:
                raise BadCheckpoint(
                    f"config.json: {name} should be {rule}, it is {own.get(name)}; choose another draft"
                )
        values = {field.name: getattr(block, field.name) for field in dataclasses.fields(block)}
        return cls(**values, taps=taps, group=group, rank=rank, candidates=candidates)

    @property
    def further_tensors(self) -> tuple[str, ...]:
        """The tensors of the selector."""
        names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        return tuple(f"{SELECTOR}.{name}" for name in names)

    def contract(self, *, capacity: int, dtype: str, cache: CacheKind = "linear") -> Contract:
        """Return the bindings of the block, ``capacity`` tokens to a cache row, computing in ``dtype``."""
        sizes = self.sizes(capacity=capacity, dtype=dtype, cache=cache)
        return contract.block(row_states=self.layer.hidden, **sizes)

    def markov(self, *, dtype: str) -> Contract:
        """Return the bindings of the selector."""
        return contract.markov(vocab=self.draft_vocab, dtype=dtype, row_states=self.layer.hidden)
