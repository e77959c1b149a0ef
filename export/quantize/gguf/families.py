"""What GGUF files of each model family hold: metadata keys, tensor names, and how tensors were changed.

Source: llama.cpp's converter from Hugging Face checkpoints, and ggml's docs/gguf.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.quantize.gguf.latent import latent_fields, sharpened

Metadata = dict[str, Any]
_NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",  # of all experts, as are the next two
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
# Modules whose only tensor has the name of the module
_WITHOUT_KIND = ("self_attn.sinks", "mlp.gate.e_score_correction_bias")
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
FREQUENCIES = "rope_freqs.weight"  # factors of the rotary frequencies, for all layers
# GGUF key after the name of the family -> field of config.json.
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_SCALING = {  # of the rotary embedding
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_UNUSED = ("attention.value_length", "rope.dimension_count")  # compared with the size of a head


@dataclass(frozen=True)
class GgufFamily:
    """A family by its GGUF name. ``permuted``: rows of queries and keys are in the order of interleaved pairs.

    ``modules`` and ``keys``: names of modules and metadata keys that other families do not have, or that stand for
    something else there. ``norm_offset``: norm weights have 1 added. ``implied``: fields of config.json that the
    family implies. ``taken`` takes keys that need more than a name, and returns their fields. ``further`` returns
    fields that depend on those that the file states.
    """

    architecture: str
    modules: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    norm_offset: bool = False
    implied: Mapping[str, Any] = field(default_factory=dict)
    taken: Callable[[Metadata], dict[str, Any]] = lambda _own: {}
    further: Callable[[dict[str, Any]], dict[str, Any]] = lambda _config: {}

    def name_of(self, name: str) -> str | None:
        """Return the checkpoint's name of a tensor; None: unknown."""
        stem, _, kind = name.rpartition(".")
        if stem in _OUTSIDE:
            return f"{_OUTSIDE[stem]}.{kind}"
        begin, _, rest = stem.partition(".")
        layer, _, module = rest.partition(".")
        stored_module = (_LAYER | dict(self.modules)).get(module)
        if begin != "blk" or not layer.isdecimal() or stored_module is None:
            return None
        in_layer = f"model.layers.{layer}.{stored_module}"
        return in_layer if stored_module in _WITHOUT_KIND else f"{in_layer}.{kind}"

    def config(self, metadata: Metadata, name: str, *, tied: bool, vocab: int) -> dict[str, Any]:
        """Return config.json for the metadata of the family ``name``. Raises BadCheckpoint for an unknown key."""
        own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
        config: dict[str, Any] = {"architectures": [self.architecture], "tie_word_embeddings": tied}
        config |= self.taken(own)
        config |= {to: own.pop(key) for key, to in (_KEYS | dict(self.keys)).items() if key in own}
        config.setdefault("vocab_size", vocab)
        heads = config.get("num_attention_heads")
        if not isinstance(heads, int):
            raise BadCheckpoint(f"{name}.attention.head_count should be a number of heads, it is {quoted(heads)}")
        config.setdefault("head_dim", int(config.get("hidden_size", 0)) // heads)
        rope = _rope(own, name)
        for key in _UNUSED:
            if own.pop(key, config["head_dim"]) != config["head_dim"]:
                raise BadCheckpoint(
                    f"{name}.{key} should be {config['head_dim']}, the size of a head; others are not read"
                )
        if own:
            names = ", ".join(quoted(f"{name}.{key}") for key in sorted(own))
            raise BadCheckpoint(f"the metadata has keys that are not read: {names}; take the original checkpoint")
        config |= rope | dict(self.implied)
        return config | self.further(config)


def _rope(own: Metadata, name: str) -> dict[str, Any]:
    """Take the keys of the rotary embedding from ``own`` and return the fields of config.json."""
    fields: dict[str, Any] = {}
    if (theta := own.pop("rope.freq_base", None)) is not None:
        fields["rope_theta"] = theta
    kind = own.pop("rope.scaling.type", "none")
    scaling = {key: own.pop(f"rope.scaling.{key}", None) for key in _SCALING}
    own.pop("rope.scaling.finetuned", None)
    if kind == "none":
        return fields
    if kind not in ("linear", "yarn"):
        raise BadCheckpoint(f"{name}.rope.scaling.type should be none, linear or yarn, it is {quoted(kind)}")
    rope: dict[str, Any] = {"rope_type": kind, "factor": scaling["factor"]}
    if kind == "yarn":
        rope |= {_SCALING[key]: value for key, value in scaling.items() if value}
    return fields | {"rope_scaling": rope}


def _gemma(larger: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the fields of Gemma; models of ``larger`` layers scale queries by the hidden size per head."""

    def further(config: dict[str, Any]) -> dict[str, Any]:
        per_head = config["hidden_size"] // config["num_attention_heads"]
        scalar = per_head if config["num_hidden_layers"] == larger else config["head_dim"]
        return {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}

    return further


def _untruncated_yarn(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rule of gpt-oss, whose ranges of frequencies are not rounded; files do not state that."""
    return {"rope_scaling": config["rope_scaling"] | {"truncate": False}} if "rope_scaling" in config else {}


def _shared_expert(name: str) -> dict[str, str]:
    """Return the modules of a shared expert of ``name``."""
    return {f"ffn_{kind}_shexp": f"mlp.{name}.{kind}_proj" for kind in ("gate", "up", "down")}


def gguf_family(metadata: Metadata) -> GgufFamily | None:
    """Return the family of a file; None: it is not read.

    Mixtral has the GGUF name of Llama, DeepSeek-V3 and GLM-4.7-Flash that of DeepSeek-V2.
    """
    name = str(metadata.get("general.architecture"))
    if name == "llama" and "llama.expert_count" in metadata:
        return _MIXTRAL
    sigmoid = metadata.get(f"{name}.expert_gating_func") == _SIGMOID
    return _DEEPSEEK_V3 if name == "deepseek2" and sigmoid else GGUF_FAMILIES.get(name)


_MIXTRAL = GgufFamily("MixtralForCausalLM", keys={"expert_count": "num_local_experts"}, permuted=True)
_SIGMOID = 2  # of expert_gating_func
_DEEPSEEK_V2 = GgufFamily(
    "DeepseekV2ForCausalLM",
    {
        **_shared_expert("shared_experts"),
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "exp_probs_b": "mlp.gate.e_score_correction_bias",
    },
    {
        "attention.kv_lora_rank": "kv_lora_rank",
        "expert_count": "n_routed_experts",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
        "leading_dense_block_count": "first_k_dense_replace",
    },
    taken=latent_fields,
    further=lambda config: (
        sharpened(config) | {"topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy"}
    ),
)
_DEEPSEEK_V3 = replace(_DEEPSEEK_V2, architecture="DeepseekV3ForCausalLM", further=sharpened)
GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", permuted=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen2moe": GgufFamily(
        "Qwen2MoeForCausalLM",
        {**_shared_expert("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        implied={"norm_topk_prob": False},
    ),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", implied={"norm_topk_prob": True}),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
        {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
        implied={"interleaved_gate_up": False},
        further=_untruncated_yarn,
    ),
    "olmoe": GgufFamily("OlmoeForCausalLM", implied={"norm_topk_prob": False}),
    "granite": GgufFamily("GraniteForCausalLM", permuted=True),
    "granitemoe": GgufFamily(
        "GraniteMoeForCausalLM",
        _shared_expert("shared_mlp"),
        {"expert_count": "num_local_experts", "expert_shared_feed_forward_length": "shared_intermediate_size"},
        permuted=True,
    ),
    "deepseek2": _DEEPSEEK_V2,
    "gemma2": GgufFamily("Gemma2ForCausalLM", _NORMS_AROUND, norm_offset=True, further=_gemma(46)),
    "gemma3": GgufFamily("Gemma3ForCausalLM", _NORMS_AROUND, norm_offset=True, further=_gemma(62)),
}
