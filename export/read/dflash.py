"""What a DFlash checkpoint says: config.json as ``speculators`` writes it, or flat as z-lab does.

Both name layers of the target, the one by their inputs, the other by their outputs.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tandemrt.engines import contract
from tandemrt.engines.contract import CacheKind, Contract
from tandemrt.engines.drafts import LONGEST_BLOCK, longest_window
from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.heads import (
    FRAME,
    HeadSpec,
    misfit,
    read_features,
    read_layers,
    read_token,
    require_token,
)
from tandemrt.export.read.spec import ModelSpec

_OWN = (  # of a flat config, beside what it says of the layers
    *("architectures", "auto_map", "dflash_config", "num_target_layers", "target_hidden_size"),
    *("block_size", "mask_token_id", "target_layer_ids"),
)


@dataclass(frozen=True)
class DFlashSpec(HeadSpec):
    """A block draft: ``block`` tokens at once, the newest one of a text and ``mask_token`` in place of the others.

    ``causal``: the layers in which a token of the block sees those in front of it alone; in the others it sees all.
    ``sample_from_anchor``: a token of the block foresees what stands behind it, the newest one too; else a mask
    foresees what stands in its place.
    """

    block: int
    mask_token: int
    causal: tuple[bool, ...]
    sample_from_anchor: bool

    @property
    def longest_window(self) -> int:
        """Tokens that a block foresees."""
        return longest_window(self.block, sample_from_anchor=self.sample_from_anchor)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelSpec, *, ignored: Collection[str] = ()) -> "DFlashSpec":
        """Read a config. Raises BadCheckpoint, by name, for what is not understood or does not fit ``target``."""
        return read_block(config, target, kind="dflash", named=("DFlashDraftModel",), ignored=ignored)

    def contract(self, *, capacity: int, dtype: str, cache: CacheKind = "linear") -> Contract:
        """Return the bindings of this draft, ``capacity`` tokens to a cache row, computing in ``dtype``."""
        return contract.decoder(**self.sizes(capacity=capacity, dtype=dtype, cache=cache))

    def context(self, *, capacity: int, dtype: str, cache: CacheKind = "linear") -> Contract:
        """Return the bindings of what writes the target's features into its cache."""
        sizes = self.sizes(capacity=capacity, dtype=dtype, cache=cache)
        return contract.context(features=self.feature_width, **sizes)


def read_block(
    config: Mapping[str, Any], target: ModelSpec, *, kind: str, named: tuple[str, ...], ignored: Collection[str]
) -> DFlashSpec:
    """What a config says of a block draft: of ``kind``, as ``speculators`` calls it, or flat, with one of ``named`` as
    its architecture. DSpark's, ``dspark``, are sampled from the anchor unless they say otherwise.

    Raises BadCheckpoint, by name, for what is not understood or does not fit ``target``.
    """
    fields = Fields(config, "config.json")
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        spec = _of_speculators(fields, target, kind)
    else:
        spec = _flat(fields, target, named, ignored, from_anchor=kind == "dspark")
        ignored = ()
    fields.finish(ignored)
    spec.require_fit(target)
    if spec.layer.hidden != target.hidden:
        raise misfit("hidden_size", f"the target's, {target.hidden}, whose embedding it reads", spec.layer.hidden)
    if not 2 <= spec.block <= LONGEST_BLOCK:
        raise BadCheckpoint(f"config.json: block_size should be 2 to {LONGEST_BLOCK}, it is {quoted(spec.block)}")
    require_token(spec.mask_token, spec)
    return spec


def _of_speculators(fields: Fields, target: ModelSpec, kind: str) -> DFlashSpec:
    fields.only("speculators_model_type", kind)
    fields.only("tie_word_embeddings", False)
    fields.skip(*FRAME)
    inner = fields.get("transformer_layer_config")
    layer, reach = read_layers(inner)
    # A layer that slides is causal within the block, whatever the length of the text, unless this says otherwise.
    mutual = fields.flag("sliding_window_non_causal", False)
    kinds = inner.get("layer_types") or ["sliding_attention" if reach else "full_attention"] * layer.layers
    return DFlashSpec(
        layer=layer,
        features=_required(read_features(fields, "aux_hidden_state_layer_ids", target), "aux_hidden_state_layer_ids"),
        target_hidden=fields.integer("target_hidden_size", target.hidden),
        draft_vocab=fields.integer("draft_vocab_size", 32_000),
        reach=reach,
        block=fields.integer("block_size", 8),
        mask_token=read_token(fields, "mask_token_id"),
        causal=tuple(each == "sliding_attention" and not mutual for each in kinds),
        sample_from_anchor=fields.flag("sample_from_anchor", kind == "dspark"),
    )


def _flat(
    fields: Fields, target: ModelSpec, named: tuple[str, ...], ignored: Collection[str], *, from_anchor: bool
) -> DFlashSpec:
    """A config whose fields of the draft stand beside those of its layers, or in ``dflash_config``."""
    if fields.get("architectures", []) not in [[each] for each in named]:
        wanted = " or ".join(repr([each]) for each in named)
        raise BadCheckpoint(f"config.json: architectures should be {wanted}, it is {quoted(fields.get(_OWN[0]))}")
    if fields.get("num_target_layers", target.layers) != target.layers:
        rule = f"the target's num_hidden_layers, {target.layers}"
        raise misfit("num_target_layers", rule, fields.get("num_target_layers"))
    within = fields.get("dflash_config", {})
    if not isinstance(within, Mapping):
        raise BadCheckpoint(f"config.json: dflash_config should be an object, it is {quoted(within)}")
    how = Fields({**fields.data, **within}, "config.json")
    inner = {name: value for name, value in how.data.items() if name not in _OWN}
    layer, reach = read_layers(inner, ignored=[name for name in ignored if name not in _OWN])
    if reach is not None:
        raise BadCheckpoint(
            "config.json: layers that slide see the block in different ways in different tools, so they are not "
            f"understood in this form, got sliding_window {reach}; choose a head in the form of speculators"
        )
    fields.skip(*fields.data)
    return DFlashSpec(
        layer=layer,
        features=_required(read_features(how, "target_layer_ids", target, behind=1), "target_layer_ids"),
        target_hidden=how.integer("target_hidden_size", target.hidden),
        draft_vocab=layer.vocab,
        reach=None,
        block=how.integer("block_size"),
        mask_token=read_token(how, "mask_token_id"),
        causal=(False,) * layer.layers,
        sample_from_anchor=from_anchor,
    )


def _required(features: tuple[int, ...] | None, name: str) -> tuple[int, ...]:
    if features is None:
        raise BadCheckpoint(f"config.json: {name} is missing: which layers of the target the head reads")
    return features
