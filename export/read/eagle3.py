"""What an EAGLE-3 checkpoint says: config.json as ``speculators`` writes it, or flat, and the maps of its vocabulary.

The flat form is that of SafeAILab, SpecForge and ModelOpt. Fields of one name mean different things in the two; what
could mean either is refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines import contract
from tandemrt.engines.contract import CacheKind, Contract
from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.spec import ModelSpec

FLAT = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
# Of ModelOpt's eagle_config: what this exporter builds.
_MODELOPT: Mapping[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (1, 0),
}
FAMILIES = ("llama", "qwen3")  # of the layers
_SLIDING = ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers")


@dataclass(frozen=True)
class Eagle3Spec:
    """An EAGLE-3 head.

    ``layer`` are its layers, the first of which reads twice its width; its ``vocab`` is the target's. ``features`` are
    the layers of the target whose inputs it reads. ``draft_vocab``: tokens that it knows.

    ``norm_features`` and ``norm_each_feature``: what is normed in front of the fusing product, all features as one or
    each by itself. ``norm_residual``: the normed state is the residual of the first layer. ``norm_fed_back``: a drafted
    token is fed with the state behind the last norm. ``reach``: tokens that a sliding window lets it see, if it has
    one; a text may not be longer.
    """

    layer: ModelSpec
    features: tuple[int, ...]
    target_hidden: int
    draft_vocab: int
    norm_features: bool
    norm_each_feature: bool
    norm_residual: bool
    norm_fed_back: bool
    reach: int | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelSpec, *, ignored: Collection[str] = ()) -> "Eagle3Spec":
        """Read a config. Raises BadCheckpoint, by name, for what is not understood or does not fit ``target``."""
        fields = Fields(config, "config.json")
        if config.get("quantization_config") is not None:
            raise BadCheckpoint(
                "config.json: quantization_config: a head must come with whole weights, got "
                f"{quoted(config['quantization_config'])}; choose one that is not quantized"
            )
        if "speculators_model_type" in config or "transformer_layer_config" in config:
            spec = _of_speculators(fields, target)
        else:
            spec = _flat(fields, target, ignored)
            ignored = ()
        fields.finish(ignored)
        layer = spec.layer
        if layer.vocab != target.vocab:
            raise _misfit("vocab_size", f"the target's, {target.vocab}", layer.vocab)
        if spec.target_hidden != target.hidden:
            raise _misfit("target_hidden_size", f"the target's hidden_size, {target.hidden}", spec.target_hidden)
        if spec.draft_vocab > layer.vocab:
            raise _misfit("draft_vocab_size", f"at most the target's vocab_size, {target.vocab}", spec.draft_vocab)
        return spec

    @property
    def head_dim(self) -> int:
        return self.layer.head_dim

    @property
    def vocab(self) -> int:
        """The width of its logits, which is the target's: a token that it does not know has none."""
        return self.layer.vocab

    @property
    def feature_width(self) -> int:
        """Numbers per token that the target gives."""
        return len(self.features) * self.target_hidden

    def contract(self, *, capacity: int, dtype: str, cache: CacheKind = "linear") -> Contract:
        """Return the bindings of this head, ``capacity`` tokens to a cache row, computing in ``dtype``."""
        layer = self.layer
        return contract.draft_head(
            hidden=layer.hidden,
            layers=layer.layers,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            capacity=capacity,
            vocab=layer.vocab,
            dtype=dtype,
            cache=cache,
        )


def target_ids(checkpoint: Checkpoint, spec: Eagle3Spec) -> npt.NDArray[np.int64] | None:
    """The target's id of every token that the head knows, from ``d2t``; None if it knows all of them.

    Raises BadCheckpoint for ids that the target does not have or that come twice, and for a ``t2d`` that disagrees.
    """
    if "d2t" not in checkpoint.tensors:
        if spec.draft_vocab != spec.vocab:
            raise BadCheckpoint(
                f"{checkpoint.folder}: tensor 'd2t' is missing: a head of {spec.draft_vocab} tokens needs it to name "
                f"those of the target's {spec.vocab}"
            )
        return None
    stored = checkpoint.read("d2t", (spec.draft_vocab,), ("int64", "int32"))
    ids: npt.NDArray[np.int64] = stored.astype(np.int64) + np.arange(spec.draft_vocab)
    outside = ids[(ids < 0) | (ids >= spec.vocab)]
    if outside.size:
        rule = f"i + d2t[i] must be ids of the target, 0..{spec.vocab - 1}; d2t holds offsets, not ids"
        raise BadCheckpoint(f"{checkpoint.folder}: {rule}; it gives {outside[0]}")
    values, times = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        rule = "i + d2t[i] must be another id for every token of the draft"
        raise BadCheckpoint(f"{checkpoint.folder}: {rule}; {values[times > 1][0]} comes twice")
    if "t2d" in checkpoint.tensors:
        known = np.flatnonzero(checkpoint.read("t2d", (spec.vocab,), ("bool", "int64", "int32", "uint8")))
        if not np.array_equal(known, values):
            rule = "t2d must be true where i + d2t[i] points"
            raise BadCheckpoint(
                f"{checkpoint.folder}: {rule}; it names {len(known)} tokens, of which "
                f"{len(np.intersect1d(known, values))} are among the {len(values)} of d2t"
            )
    return ids


def _of_speculators(fields: Fields, target: ModelSpec) -> Eagle3Spec:
    fields.only("speculators_model_type", "eagle3")
    fields.skip(
        *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "speculators_version"),
        *("speculators_config", "embed_requires_grad"),
    )
    fields.only("tie_word_embeddings", False)
    layer, reach = _layer(fields.get("transformer_layer_config"))
    return Eagle3Spec(
        layer=layer,
        features=_features(fields, "eagle_aux_hidden_state_layer_ids", target),
        target_hidden=fields.integer("target_hidden_size", target.hidden),
        draft_vocab=fields.integer("draft_vocab_size", 32_000),
        norm_features=fields.flag("norm_before_fc", False),
        norm_each_feature=fields.flag("fc_norm", False),
        norm_residual=fields.flag("norm_before_residual", False),
        norm_fed_back=fields.flag("norm_output", False),
        reach=reach,
    )


def _flat(fields: Fields, target: ModelSpec, ignored: Collection[str]) -> Eagle3Spec:
    own = ("architectures", "draft_vocab_size", "target_hidden_size", "eagle_config", "fc_norm", "norm_output")
    named = fields.get("architectures", [])
    if not isinstance(named, list) or any(name not in FLAT for name in named):
        raise BadCheckpoint(
            f"config.json: architectures should be one of {', '.join(FLAT)} for an EAGLE-3 head, it is {quoted(named)}"
        )
    if fields.get("norm_output") is not None and "norm_output" not in ignored:
        raise BadCheckpoint(
            f"config.json: norm_output is {quoted(fields.get('norm_output'))}: in SpecForge it says that a norm stands "
            "in front of lm_head, in speculators that the normed state is fed back; if it is the former, name it in "
            'the recipe beside the checkpoint, as ignore_config_fields = ["norm_output"]'
        )
    inner = {name: value for name, value in fields.data.items() if name not in own}
    layer, reach = _layer(inner, ignored=[name for name in ignored if name not in own])
    fields.skip(*fields.data)
    modelopt = Fields(fields.get("eagle_config", {}), "config.json, eagle_config")
    for name, values in _MODELOPT.items():
        modelopt.only(name, *values)
    features = _features(modelopt, "eagle_aux_hidden_state_layer_ids", target)
    modelopt.finish()
    return Eagle3Spec(
        layer=layer,
        features=features,
        target_hidden=fields.integer("target_hidden_size", target.hidden),
        draft_vocab=fields.integer("draft_vocab_size", layer.vocab),
        norm_features=False,
        norm_each_feature=fields.flag("fc_norm", False),
        norm_residual=False,
        norm_fed_back=False,
        reach=reach,
    )


def _layer(config: Any, ignored: Collection[str] = ()) -> tuple[ModelSpec, int | None]:
    """The layers of a head, and the sliding window that any of them has.

    Tools count the window of a head in different ways, so it is taken out here: within it, all of them agree.
    """
    if not isinstance(config, Mapping):
        raise BadCheckpoint(f"config.json: transformer_layer_config should be an object, it is {quoted(config)}")
    kinds = config.get("layer_types") or []
    slides = "sliding_attention" in kinds if kinds else bool(config.get("use_sliding_window"))
    reach = None
    if slides:
        window = config.get("sliding_window")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise BadCheckpoint(f"config.json: sliding_window should be a whole number, it is {quoted(window)}")
        reach = window
    rest = {name: value for name, value in config.items() if name not in _SLIDING}
    spec = ModelSpec.from_hf(rest, ignored=ignored)
    if spec.family not in FAMILIES:
        raise BadCheckpoint(
            f"config.json: the layers of a head should be of {' or '.join(FAMILIES)}, they are of {spec.family}"
        )
    return replace(spec, tied=False), reach


def _features(fields: Fields, name: str, target: ModelSpec) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads; the published default where the config names none."""
    named = fields.get(name)
    layers = target.layers
    if named in (None, []):
        ids = [2, layers // 2, layers - 3]
        if len(set(ids)) < 3 or min(ids) < 1:
            raise BadCheckpoint(
                f"{fields.where}: {name} must be given for a target of {layers} layers: the default, {ids}, needs at "
                "least 7"
            )
        return tuple(ids)
    if not isinstance(named, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in named):
        raise BadCheckpoint(f"{fields.where}: {name} should be a list of layers, it is {quoted(named)}")
    wrong = [each for each in named if not 0 <= each < layers]
    if wrong or len(set(named)) < len(named):
        raise BadCheckpoint(
            f"{fields.where}: {name} should name different layers of the target by their inputs, 0..{layers - 1} "
            f"(tools disagree on {layers}, what the last one gives), it is {quoted(named)}"
        )
    return tuple(named)


def _misfit(name: str, rule: str, value: object) -> BadCheckpoint:
    return BadCheckpoint(
        f"config.json: {name} should be {rule}, it is {quoted(value)}; choose a head that was trained for this target"
    )
