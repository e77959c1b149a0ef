"""The families of models that are understood, a row for each.

Everything else is read from the config (export/read/spec.py), so a family has no code of its own but a reader of
fields that only it has.
"""

from collections.abc import Mapping
from typing import Any

from tandemrt.export.read import family as of
from tandemrt.export.read.block import Activation, BlockNorms, QKNorm
from tandemrt.export.read.family import Family
from tandemrt.export.read.layer_kinds import (
    all_or_none,
    every,
    named_rotary,
    one_window,
    sliding_rotary,
    switched_window,
)
from tandemrt.export.read.rope import RopeRules

_NORMS_BEHIND = BlockNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_NORMS_AROUND = BlockNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_GLM_NORMS = BlockNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_GELU: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}
_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_TRAINING = ("residual_dropout", "resid_pdrop", "embd_pdrop", "pretraining_tp")  # transformers reads the last nowhere


_ROUTER = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # training only
_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

_ROWS = (
    Family("llama", ("LlamaForCausalLM",), biases=of.named_biases, neutral={"pretraining_tp": (1,)}),
    Family(
        "mistral",
        ("MistralForCausalLM",),
        defaults={"sliding_window": 4096},  # what transformers takes where the field is absent; null switches it off
        windows=one_window,
    ),
    Family("qwen2", ("Qwen2ForCausalLM",), biases=of.qkv_biases, windows=switched_window),
    Family("mimo", ("MiMoForCausalLM",), biases=of.qkv_biases, windows=switched_window),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM",),
        defaults={"head_dim": 128},
        qk_norm=QKNorm(),
        biases=of.attention_biases,
        windows=switched_window,
    ),
    Family(
        "ministral3",
        ("Ministral3ForCausalLM",),
        defaults={"head_dim": 128},
        windows=one_window,
        rope=RopeRules(default=_MINISTRAL_ROPE),
    ),
    Family(
        "seed_oss",
        ("SeedOssForCausalLM",),
        defaults={"head_dim": 128},
        biases=of.seed_biases,
        irrelevant=_TRAINING,
    ),
    Family("granite", ("GraniteForCausalLM",), biases=of.named_biases, scales=of.granite_scales),
    Family(
        "phi3",
        ("Phi3ForCausalLM",),
        windows=one_window,
        rope=RopeRules(partial=1.0),
        neutral={"lm_head_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,)},
        irrelevant=(*_TRAINING, "original_max_position_embeddings"),  # longrope reads it
    ),
    Family(
        "smollm3",
        ("SmolLM3ForCausalLM",),
        defaults={"tie_word_embeddings": True},
        biases=of.named_biases,
        rotary=named_rotary,
        rope=RopeRules(default={"rope_theta": 2_000_000.0}),
        irrelevant=_TRAINING,
    ),
    Family(
        "arcee",
        ("ArceeForCausalLM",),
        biases=of.named_biases,
        activations={"relu2": "relu2"},
        gated=False,
    ),
    Family(
        "cwm",
        ("CwmForCausalLM",),
        defaults={"head_dim": 128, "sliding_window": 8192},
        biases=of.mlp_bias,
        windows=every(4, full=0),
        rope=RopeRules(default=_CWM_ROPE),
        irrelevant=_TRAINING,
    ),
    Family(
        "olmo2",
        ("Olmo2ForCausalLM",),
        norms=_NORMS_BEHIND,
        qk_norm=QKNorm(over_all_heads=True),
        biases=of.attention_biases,
    ),
    Family(
        "olmo3",
        ("Olmo3ForCausalLM",),
        defaults={"sliding_window": 4096},
        norms=_NORMS_BEHIND,
        qk_norm=QKNorm(over_all_heads=True),
        biases=of.attention_biases,
        windows=every(4),
        rope=RopeRules(default={"rope_theta": 500_000.0}, local_theta=("rope_theta", 500_000.0)),
    ),
    Family(
        "gemma2",
        ("Gemma2ForCausalLM",),
        defaults=_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        norms=_NORMS_AROUND,
        norm_offset=True,
        biases=of.attention_biases,
        windows=every(2),
        scales=of.gemma_scales,
        activations=_GELU,
        activation_field="hidden_activation",
        neutral={"hidden_act": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)},
        irrelevant=("sliding_window_size",),  # the name of sliding_window in the first version
    ),
    Family(
        "gemma3_text",
        ("Gemma3ForCausalLM",),
        defaults=_GEMMA | {"max_position_embeddings": 131_072, "vocab_size": 262_208},
        norms=_NORMS_AROUND,
        norm_offset=True,
        qk_norm=QKNorm(),
        biases=of.attention_biases,
        windows=every(6, named="sliding_window_pattern"),
        rope=RopeRules(default={"rope_theta": 1_000_000.0}, local_theta=("rope_local_base_freq", 10_000.0)),
        scales=of.gemma_scales,
        activations=_GELU,
        activation_field="hidden_activation",
        neutral={"use_bidirectional_attention": (False,)},
    ),
    Family(
        "glm4",
        ("Glm4ForCausalLM",),
        defaults={"head_dim": 128},
        norms=_GLM_NORMS,
        biases=of.glm_biases,
        rope=RopeRules(partial=0.5, interleaved=True),
    ),
    Family(
        "exaone4",
        ("Exaone4ForCausalLM",),
        defaults={"sliding_window": 4096},
        norms=_NORMS_BEHIND,
        qk_norm=QKNorm(),
        windows=every(4, named="sliding_window_pattern"),
        rotary=sliding_rotary,
    ),
    Family(
        "hunyuan_v1_dense",
        ("HunYuanDenseV1ForCausalLM",),
        qk_norm=QKNorm("query_layernorm", "key_layernorm", after_rotary=True),
        biases=of.attention_biases,
        neutral={
            "add_classification_head": (False,),
            "norm_type": ("rms",),
            "use_cla": (False,),
            "use_qk_norm": (True,),
            "use_rotary_pos_emb": (True,),
        },
        irrelevant=(
            *_TRAINING,
            *("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "eod_token_id", "org_vocab_size"),
            *("pad_id", "pool_type", "mask_init_id", "im_start_id", "im_end_id", "im_newline_id", "sep_token_id"),
        ),
    ),
    Family(
        "ernie4_5",
        ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
        defaults={"head_dim": 128, "tie_word_embeddings": True},
        biases=of.one_bias,
        rope=RopeRules(default={"rope_theta": 500_000.0}, interleaved=True),
    ),
    Family(
        "mixtral",
        ("MixtralForCausalLM",),
        windows=one_window,
        rope=RopeRules(default={"rope_theta": 1_000_000.0}),
        irrelevant=_ROUTER,
        experts=of.mixtral_experts,
    ),
    Family(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        qk_norm=QKNorm(),
        biases=of.attention_biases,
        windows=all_or_none,
        neutral={"qkv_bias": (False,), "use_qk_norm": (True,), "shared_expert_intermediate_size": (0,)},
        irrelevant=_ROUTER,
        experts=of.qwen_experts,
    ),
    Family(
        "gpt_oss",
        ("GptOssForCausalLM",),
        defaults={"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "attention_bias": True},
        sinks=True,
        biases=of.attention_biases,
        windows=every(2),
        rope=RopeRules(default=_GPT_OSS_ROPE),
        irrelevant=(*_ROUTER, "initial_context_length"),  # rope_scaling says it
        experts=of.gpt_oss_experts,
    ),
)
FAMILIES = {architecture: row for row in _ROWS for architecture in row.architectures}
