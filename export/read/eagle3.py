"""Read the config of an EAGLE-3 or P-EAGLE checkpoint: the form of ``speculators``, or the flat form.

SafeAILab, SpecForge and ModelOpt write the flat form. Equal field names have different meanings in the two forms:
``speculators`` lists layers of the target by their inputs, the flat form by their outputs. Ambiguous values are
rejected.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import CacheKind, Contract
from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.draft_heads import (
    FAMILIES,
    SPECULATORS_FIELDS,
    DraftHeadSpec,
    other_draft,
    read_features,
    read_layers,
    read_mask_token,
    require_mask_token,
)
from tandemrt.export.read.families.common import HUNYUAN_UNUSED, HUNYUAN_VALUES
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.spec import ModelSpec

# Heads with latent attention and an MLP (EAGLE-3.1): by vLLM, and by SpecForge.
_LATENT_VLLM = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
_LATENT = (*_LATENT_VLLM, "DeepseekV3ForCausalLMEagle3")
_DENSE = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "Eagle3DraftModel",
    "Eagle3Speculator",
)
FLAT = _DENSE + _LATENT
_FLAT_PARALLEL = ("PEagleDraftModel", "PEagleSpeculator", "PeagleLlamaForCausalLM")
_MASK_TOKENS = ("mask_token_id", "ptd_token_id")  # names of one field: of speculators and of AWS
_SPECFORGE = "LlamaForCausalLMEagle3"  # its layers are Llama's; a model_type only names the target's family
# About the target; the layers of SpecForge and AngelSlim read none of them.
_UNREAD = (
    *("target_model_type", "modal_type", "decoder_sparse_step", "output_router_logits", "router_aux_loss_coef"),
    *("image_token_id", "video_token_id", "vision_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("eod_token_id", "image_start_token_id", "image_end_token_id", "image_newline_token_id"),
    *("text_start_id", "text_end_id", *HUNYUAN_UNUSED, *HUNYUAN_VALUES),
)
# The values of ModelOpt's eagle_config that this exporter implements.
_MODELOPT: Mapping[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (1, 0),
}


@dataclass(frozen=True)
class Eagle3Spec(DraftHeadSpec):
    """An EAGLE-3 head, or a P-EAGLE head, which has a ``mask_token``; the first layer reads twice its width.

    ``norm_features`` and ``norm_each_feature``: the norm before the fusing matmul covers all features together, or
    each feature separately. ``norm_residual``: the residual of the first layer is the normed state. ``norm_fed_back``:
    the state that is fed back with a drafted token is the output of the last norm, else its input.
    ``norm_before_head``: lm_head reads the output of the last norm, else its input.
    """

    norm_features: bool
    norm_each_feature: bool
    norm_residual: bool
    norm_fed_back: bool
    norm_before_head: bool = True
    mask_token: int | None = None

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], target: ModelSpec, *, ignored: Collection[str] = (), parallel: bool = False
    ) -> "Eagle3Spec":
        """Read the config of an EAGLE-3 head, or of a P-EAGLE head if ``parallel``.

        Raises BadCheckpoint, by name, for unknown fields and values that do not fit ``target``.
        """
        fields = Fields(config, "config.json")
        if "speculators_model_type" in config or "transformer_layer_config" in config:
            spec = _of_speculators(fields, target, parallel=parallel)
        else:
            spec = _flat(fields, target, ignored, parallel=parallel)
            ignored = ()
        fields.finish(ignored)
        spec.require_fit(target)
        if spec.mask_token is not None:
            require_mask_token(spec.mask_token, spec)
        return spec

    def contract(self, *, capacity: int, dtype: str, cache: CacheKind = "linear") -> Contract:
        """Return the bindings of this head, ``capacity`` tokens to a cache row, computing in ``dtype``."""
        sizes = self.sizes(capacity=capacity, dtype=dtype, cache=cache)
        return contract.draft_head(hidden=self.layer.hidden, parallel=self.mask_token is not None, **sizes)


def _of_speculators(fields: Fields, target: ModelSpec, *, parallel: bool) -> Eagle3Spec:
    fields.only("speculators_model_type", "peagle" if parallel else "eagle3")
    fields.skip(*SPECULATORS_FIELDS, "embed_requires_grad")
    fields.only("tie_word_embeddings", False)
    layer, max_context = read_layers(fields.get("transformer_layer_config"))
    return Eagle3Spec(
        layer=layer,
        features=_features(fields, "eagle_aux_hidden_state_layer_ids", target),
        target_hidden=fields.integer("target_hidden_size", target.hidden),
        draft_vocab=fields.integer("draft_vocab_size", 32_000),
        norm_features=fields.flag("norm_before_fc", False),
        norm_each_feature=fields.flag("fc_norm", False),
        norm_residual=fields.flag("norm_before_residual", False),
        norm_fed_back=fields.flag("norm_output", False),
        max_context=max_context,
        mask_token=read_mask_token(fields, "mask_token_id") if parallel else None,
    )


def _flat(fields: Fields, target: ModelSpec, ignored: Collection[str], *, parallel: bool) -> Eagle3Spec:
    own = {"architectures", "draft_vocab_size", "target_hidden_size", "eagle_config", "fc_norm", "norm_output"}
    own |= set(_MASK_TOKENS) if parallel else set()
    named, known = fields.get("architectures", []), _FLAT_PARALLEL if parallel else FLAT
    if not isinstance(named, list) or any(name not in known for name in named) or (parallel and not named):
        raise other_draft(named, ", ".join(known), "a P-EAGLE head" if parallel else "an EAGLE-3 head")
    of_specforge = named == [_SPECFORGE]
    latent, of_vllm = bool(named) and named[0] in _LATENT, bool(named) and named[0] in _LATENT_VLLM
    own |= {"norm_before_residual"} if parallel or of_vllm else set()
    if fields.get("norm_output") is not None and not of_specforge and not of_vllm and "norm_output" not in ignored:
        raise BadCheckpoint(
            f"config.json: norm_output is {quoted(fields.get('norm_output'))}: in SpecForge it means a norm before "
            "lm_head, in speculators that the normed state is fed back; if it is the former and true, name it in the "
            'recipe\'s section of the checkpoint, as ignore_config_fields = ["norm_output"]'
        )
    inner = {name: value for name, value in fields.data.items() if name not in {*own, *_UNREAD}}
    if of_specforge and inner.get("model_type") in ("phi3", "qwen2"):
        inner["model_type"] = "llama"
    if latent:
        inner["first_k_dense_replace"] = inner.get("num_hidden_layers")  # no layer has experts
    families = ("deepseek_v3",) if latent else FAMILIES
    layer, max_context = read_layers(inner, [name for name in ignored if name not in own], families)
    fields.skip(*fields.data)
    modelopt = Fields(fields.section("eagle_config"), "config.json, eagle_config")
    for name, values in _MODELOPT.items():
        modelopt.only(name, *values)
    # ModelOpt, and SpecForge through SGLang, train on the outputs of these layers; vLLM feeds their inputs. All of them
    # concatenate features in layer order; ModelOpt's list is unordered.
    offset = 0 if of_vllm else 1
    features = tuple(sorted(_features(modelopt, "eagle_aux_hidden_state_layer_ids", target, offset=offset)))
    modelopt.finish()
    return Eagle3Spec(
        layer=layer,
        features=features,
        target_hidden=fields.integer("target_hidden_size", target.hidden),
        draft_vocab=fields.integer("draft_vocab_size", layer.vocab),
        norm_features=False,
        norm_each_feature=fields.flag("fc_norm", False),
        norm_residual=(parallel or of_vllm) and fields.flag("norm_before_residual", False),
        norm_fed_back=of_vllm and fields.flag("norm_output", False),
        norm_before_head=fields.flag("norm_output", True) if of_specforge else True,
        max_context=max_context,
        mask_token=_flat_mask_token(fields) if parallel else None,
    )


def _flat_mask_token(fields: Fields) -> int:
    field = next((name for name in _MASK_TOKENS if name in fields.data), None)
    if field is None:
        raise BadCheckpoint(
            f"config.json: {_MASK_TOKENS[0]} should be an id, it is missing: SpecForge does not save it; add the id of "
            "the training run (by default the tokenizer's mask token, else its number of tokens; Qwen3: 151669)"
        )
    return read_mask_token(fields, field)


def _features(fields: Fields, name: str, target: ModelSpec, *, offset: int = 0) -> tuple[int, ...]:
    """Return ``read_features``, or the published default if the config lists no layers."""
    features = read_features(fields, name, target, offset=offset)
    if features is not None:
        return features
    ids = (2, target.layers // 2, target.layers - 3)
    if len(set(ids)) < 3 or min(ids) < 1:
        raise BadCheckpoint(
            f"{fields.where}: {name} must be given for a target of {target.layers} layers: the default, {list(ids)}, "
            "needs at least 7"
        )
    return ids
