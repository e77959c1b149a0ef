"""Read the config of a DFlash checkpoint: the form of ``speculators``, or the flat form of z-lab and AngelSlim.

Both forms list layers of the target: ``speculators`` by their inputs, the flat form by their outputs.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import CacheKind, Contract
from tandemrt.engines.contract.draft_kinds import MAX_BLOCK_DRAFT, max_block_drafts
from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.draft_heads import (
    SPECULATORS_FIELDS,
    DraftHeadSpec,
    mismatch,
    other_draft,
    read_features,
    read_layers,
    read_mask_token,
    require_mask_token,
)
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.spec import ModelSpec

FLAT = ("DFlashDraftModel", "QwenDFlashDraftModel")
_OWN = (  # the draft's own fields in a flat config; the others describe the layers
    *("architectures", "auto_map", "dflash_config", "num_target_layers", "target_hidden_size"),
    *("block_size", "mask_token_id", "target_layer_ids"),
    *("use_swa", "swa_window_size", "causal", "is_causal"),
    *("num_anchors", "loss_decay_gamma", "attention_backend"),  # of AngelSlim's training
)


@dataclass(frozen=True)
class DFlashSpec(DraftHeadSpec):
    """A block draft: one pass over ``block_size`` tokens, the newest token of the text and then ``mask_token``.

    ``causal``: for each layer, whether a token of the block sees only the earlier tokens of the block, else it sees
    the complete block. ``sample_from_anchor``: each token of the block, the newest included, predicts the token after
    it; else each mask predicts the token in its own place.
    """

    block_size: int
    mask_token: int
    causal: tuple[bool, ...]
    sample_from_anchor: bool

    @property
    def max_draft_tokens(self) -> int:
        """The number of tokens that one block predicts."""
        return max_block_drafts(self.block_size, sample_from_anchor=self.sample_from_anchor)

    @property
    def further_tensors(self) -> tuple[str, ...]:
        """Tensors of the checkpoint that the graphs of a block draft do not read."""
        return ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelSpec, *, ignored: Collection[str] = ()) -> "DFlashSpec":
        """Read a config. Raises BadCheckpoint, by name, for unknown fields and values that do not fit ``target``."""
        return read_block_draft(config, target, kind="dflash", from_anchor=False, named=FLAT, ignored=ignored)

    def contract(self, *, capacity: int, dtype: str, cache: CacheKind = "linear") -> Contract:
        """Return the bindings of this draft, ``capacity`` tokens to a cache row, computing in ``dtype``."""
        return contract.decoder(**self.sizes(capacity=capacity, dtype=dtype, cache=cache))

    def context(self, *, capacity: int, dtype: str, cache: CacheKind = "linear") -> Contract:
        """Return the bindings of the graph that writes the target's features into the draft's cache."""
        sizes = self.sizes(capacity=capacity, dtype=dtype, cache=cache)
        return contract.context(features=self.feature_width, **sizes)


def flat_fields(config: Mapping[str, Any]) -> Fields:
    """Return the fields of a draft's config together with those of its ``dflash_config``, if that is an object."""
    nested = config.get("dflash_config")
    return Fields({**config, **(nested if isinstance(nested, Mapping) else {})}, "config.json")


def without_fields(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return ``config`` without the fields called ``names``, which may also be in its ``dflash_config``."""
    rest = {name: value for name, value in config.items() if name not in names}
    if isinstance(rest.get("dflash_config"), Mapping):
        rest["dflash_config"] = without_fields(rest["dflash_config"], names)
    return rest


def read_block_draft(
    config: Mapping[str, Any],
    target: ModelSpec,
    *,
    kind: str,
    from_anchor: bool,
    named: tuple[str, ...],
    ignored: Collection[str],
) -> DFlashSpec:
    """Read the config of a block draft.

    ``kind``: the expected ``speculators_model_type``. ``from_anchor``: whether the kind samples from the anchor by
    default. ``named``: the architectures accepted in a flat config. Raises BadCheckpoint, by name, for unknown fields
    and values that do not fit ``target``.
    """
    fields = Fields(config, "config.json")
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        spec = _of_speculators(fields, target, kind, from_anchor=from_anchor)
    else:
        spec = _flat(fields, target, named, ignored, from_anchor=from_anchor)
        ignored = ()
    fields.finish(ignored)
    spec.require_fit(target)
    if spec.layer.hidden != target.hidden:
        raise mismatch("hidden_size", f"the target's, {target.hidden}, whose embedding it reads", spec.layer.hidden)
    if not 2 <= spec.block_size <= MAX_BLOCK_DRAFT:
        raise BadCheckpoint(
            f"config.json: block_size should be 2 to {MAX_BLOCK_DRAFT}, it is {quoted(spec.block_size)}"
        )
    require_mask_token(spec.mask_token, spec)
    return spec


def _of_speculators(fields: Fields, target: ModelSpec, kind: str, *, from_anchor: bool) -> DFlashSpec:
    fields.only("speculators_model_type", kind)
    fields.only("tie_word_embeddings", False)
    fields.skip(*SPECULATORS_FIELDS)
    inner = fields.get("transformer_layer_config")
    layer, max_context = read_layers(inner)
    # A sliding layer is causal within the block at any text length, unless this flag is set.
    mutual = fields.flag("sliding_window_non_causal", False)
    kinds = inner.get("layer_types") or ["sliding_attention" if max_context else "full_attention"] * layer.layers
    return DFlashSpec(
        layer=layer,
        features=_required(read_features(fields, "aux_hidden_state_layer_ids", target), "aux_hidden_state_layer_ids"),
        target_hidden=fields.integer("target_hidden_size", target.hidden),
        draft_vocab=fields.integer("draft_vocab_size", 32_000),
        max_context=max_context,
        block_size=fields.integer("block_size", 8),
        mask_token=read_mask_token(fields, "mask_token_id"),
        causal=tuple(each == "sliding_attention" and not mutual for each in kinds),
        sample_from_anchor=fields.flag("sample_from_anchor", from_anchor),
    )


def _flat(
    fields: Fields, target: ModelSpec, named: tuple[str, ...], ignored: Collection[str], *, from_anchor: bool
) -> DFlashSpec:
    """Read a config with the draft's fields at the top level, next to the layers' fields, or in ``dflash_config``."""
    if fields.get("architectures", []) not in [[each] for each in named]:
        raise other_draft(fields.get(_OWN[0]), " or ".join(named), "a block draft")
    if fields.get("num_target_layers", target.layers) != target.layers:
        rule = f"the target's num_hidden_layers, {target.layers}"
        raise mismatch("num_target_layers", rule, fields.get("num_target_layers"))
    how = Fields({**fields.data, **fields.section("dflash_config")}, "config.json")
    inner = {name: value for name, value in how.data.items() if name not in _OWN}
    how.require("layer_types", isinstance(how.get("layer_types", []), list), "a list")
    every = how.flag("use_swa", False) and "sliding_attention" not in (inner.get("layer_types") or [])
    if every:
        window = how.get("swa_window_size", inner.get("sliding_window"))
        inner |= {"layer_types": ["sliding_attention"], "sliding_window": window}
    layer, max_context = read_layers(inner, ignored=[name for name in ignored if name not in _OWN])
    causal = _causal(how, inner.get("layer_types"), layer.layers, slides=max_context is not None, every=every)
    fields.skip(*fields.data)
    return DFlashSpec(
        layer=layer,
        features=_required(read_features(how, "target_layer_ids", target, offset=1), "target_layer_ids"),
        target_hidden=how.integer("target_hidden_size", target.hidden),
        draft_vocab=layer.vocab,
        max_context=max_context,
        block_size=how.integer("block_size"),
        mask_token=read_mask_token(how, "mask_token_id"),
        causal=causal,
        sample_from_anchor=from_anchor,
    )


def _causal(how: Fields, kinds: list[str] | None, layers: int, *, slides: bool, every: bool) -> tuple[bool, ...]:
    """Return DFlashSpec.causal of a flat config: by its own field, else sliding layers of ``layer_types`` are causal.

    ``every``: all layers slide because of ``use_swa``; they see the complete block. vLLM and TensorRT-LLM read it so.
    """
    flags = [how.flag(name, False) for name in ("causal", "is_causal") if name in how.data]
    if len(set(flags)) > 1:
        raise BadCheckpoint(f"config.json: causal and is_causal should be equal, they are {quoted(flags)}")
    if flags or every or not slides:
        return (bool(flags) and flags[0],) * layers
    if not kinds:
        raise BadCheckpoint(
            "config.json: use_sliding_window without layer_types does not say which layers of a block draft slide; "
            "write layer_types, or choose another head"
        )
    return tuple(kind == "sliding_attention" for kind in kinds)


def _required(features: tuple[int, ...] | None, name: str) -> tuple[int, ...]:
    if features is None:
        raise BadCheckpoint(f"config.json: {name} is missing: it lists the target's layers that the head reads")
    return features
