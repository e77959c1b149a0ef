"""Families whose layers have attention over keys and values and an MLP."""

from collections.abc import Mapping
from typing import Any

from tandemrt.export.read import experts
from tandemrt.export.read import family as of
from tandemrt.export.read.families import tensor_names
from tandemrt.export.read.families.common import HUNYUAN_UNUSED, HUNYUAN_VALUES, NORMS_AFTER, TRAINING
from tandemrt.export.read.family import Family
from tandemrt.export.read.layer import Activation, NormNames, QKNorm
from tandemrt.export.read.layer_kinds import (
    alternating_windows,
    configured_window,
    ending_in_full,
    listed_rotary,
    listed_window,
    rotary_by_theta,
    sliding_rotary,
    uniform_window,
)
from tandemrt.export.read.rope import RopeRules
from tandemrt.export.read.variants import gemma4_layers, gemma4_scales, solar_skips

_NORMS_AROUND = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_NORMS_OF_OUTPUTS = NormNames("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
_GLM_NORMS = NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_GELU: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}
_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
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
_GEMMA4_ROPE = {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25}
_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_OF_GEMMA = ("head_dim", "rms_norm_eps", "tie_word_embeddings")  # defaults of Gemma 1, too
_LIKE_GEMMA2: dict[str, Any] = {
    "norm_offset": True,
    "biases": of.attention_biases,
    "scales": of.gemma_scales,
    "activations": _GELU,
    "activation_field": "hidden_activation",
}

ROWS = (
    Family(
        "llama",
        (
            *("LlamaForCausalLM", "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "AquilaModel", "AquilaForCausalLM"),
            *("LLaMAForCausalLM", "XverseForCausalLM", "TeleChat3ForCausalLM"),
        ),
        aliases=("iquestcoder", "internlm3", "aquila", "xverse", "telechat3"),
        field_names={
            "qkv_bias": "attention_bias",
            "bias": "mlp_bias",
            "max_sequence_length": "max_position_embeddings",
        },
        biases=of.named_biases,
        no_effect_values={"pretraining_tp": (1,), "clip_qkv": (None,)},
    ),
    Family(
        "mistral",
        ("MistralForCausalLM", "GritLM"),
        defaults={"sliding_window": 4096},  # the default of transformers; null disables the window
        windows=uniform_window,
    ),
    Family("qwen2", ("Qwen2ForCausalLM",), biases=of.qkv_biases, windows=configured_window),
    Family("mimo", ("MiMoForCausalLM",), biases=of.qkv_biases, windows=configured_window),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM",),
        defaults={"head_dim": 128},
        qk_norm=QKNorm(),
        biases=of.attention_biases,
        windows=configured_window,
    ),
    Family("ministral", ("MinistralForCausalLM",), defaults={"sliding_window": 4096}, windows=listed_window),
    Family(
        "ministral3",
        ("Ministral3ForCausalLM",),
        defaults={"head_dim": 128},
        windows=uniform_window,
        rope=RopeRules(default=_MINISTRAL_ROPE),
    ),
    Family(
        "seed_oss",
        ("SeedOssForCausalLM",),
        defaults={"head_dim": 128},
        biases=of.seed_biases,
        unused_fields=TRAINING,
    ),
    Family("granite", ("GraniteForCausalLM",), biases=of.named_biases, scales=of.granite_scales),
    Family(
        "minicpm",
        ("MiniCPMForCausalLM",),
        defaults={"tie_word_embeddings": True},
        biases=of.attention_biases,
        scales=of.minicpm_scales,
        no_effect_values={"num_experts": (0,), "sparse_config": (None,)},
        unused_fields=("pretraining_tp", "mup_denominator"),
    ),
    Family(
        "granite_swa",
        ("GraniteSWAForCausalLM",),
        defaults={"num_key_value_heads": 4, "sliding_window": 128, "tie_word_embeddings": True},
        sinks=True,
        biases=of.named_biases,
        windows=alternating_windows(4, full=0),
        rotary=rotary_by_theta,
        scales=of.granite_scales,
    ),
    Family(
        "hyperclovax",
        ("HyperCLOVAXForCausalLM",),
        norms=_NORMS_OF_OUTPUTS,
        biases=of.named_biases,
        scales=of.hyperclovax_scales,
        no_effect_values={"use_post_norm": (True,)},
        unused_fields=TRAINING,
    ),
    Family(
        "stablelm",
        ("StableLmForCausalLM", "StableLMEpochForCausalLM"),
        aliases=("stablelm_epoch",),
        field_names={"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"},
        norms=of.one_norm_if_parallel,
        qk_norm=QKNorm("q_layernorm", "k_layernorm", by_head=True),
        qk_norm_flag="qk_layernorm",
        layer_norm=True,
        norm_eps_field="layer_norm_eps",
        biases=of.use_qkv_bias,
        rope=RopeRules(partial=0.25),
        no_effect_values={"rotary_scaling_factor": (1.0,)},
        unused_fields=("hidden_dropout", "num_heads"),
    ),
    Family(
        "persimmon",
        ("PersimmonForCausalLM",),
        tensor_names=tensor_names.PERSIMMON,
        defaults={"qk_layernorm": True},
        layer_norm=True,
        norm_eps_field="layer_norm_eps",
        qk_norm=QKNorm("q_layernorm", "k_layernorm"),
        qk_norm_flag="qk_layernorm",
        biases=of.always_biased,
        stored_by_head=("q", "k", "v"),
        rope=RopeRules(partial=0.5),
        activations={"relu2": "relu2"},
        gated=False,
        unused_fields=("hidden_dropout",),
    ),
    Family(
        "apertus",
        ("ApertusForCausalLM",),
        norms=NormNames("attention_layernorm", None, "feedforward_layernorm"),
        qk_norm=QKNorm(),
        biases=of.attention_biases,
        rope=RopeRules(default=_APERTUS_ROPE),
        activations={"xielu": "xielu"},
        gated=False,
        no_effect_values={"post_norm": (False,), "qk_norm": (True,)},
        unused_fields=("hidden_dropout",),
    ),
    Family(
        "starcoder2",
        ("Starcoder2ForCausalLM",),
        tensor_names=tensor_names.STARCODER,
        defaults={"tie_word_embeddings": True, "use_bias": True},
        layer_norm=True,
        norm_eps_field="norm_epsilon",
        biases=of.one_bias,
        windows=uniform_window,
        activations=_GELU,
        gated=False,
        no_effect_values={
            "activation_function": ("gelu_pytorch_tanh",),
            "mlp_type": ("default",),
            "norm_type": ("layer_norm",),
        },
        unused_fields=(*TRAINING, "embedding_dropout", "layer_norm_epsilon"),  # norm_epsilon is read
    ),
    Family(
        "nemotron",
        ("NemotronForCausalLM",),
        layer_norm=True,
        norm_offset=True,
        norm_eps_field="norm_eps",
        biases=of.named_biases,
        rope=RopeRules(partial=0.5),
        activations={"relu2": "relu2"},
        gated=False,
        unused_fields=("hidden_dropout", "kv_channels", "rope_percent"),  # head_dim and partial_rotary_factor are read
    ),
    Family(
        "jais2",
        ("Jais2ForCausalLM",),
        defaults={"attention_bias": True, "mlp_bias": True},
        layer_norm=True,
        norm_eps_field="layer_norm_eps",
        biases=of.named_biases,
        activations={"relu2": "relu2"},
        gated=False,
    ),
    Family(
        "helium",
        ("HeliumForCausalLM",),
        defaults={"head_dim": 128, "rms_norm_eps": 1e-8},
        biases=of.qkv_and_mlp_biases,
        rope=RopeRules(default={"rope_theta": 100_000.0}, interleaved=True),
    ),
    Family(
        "phi3",
        ("Phi3ForCausalLM",),
        defaults={"original_max_position_embeddings": 4096},
        windows=uniform_window,
        rope=RopeRules(partial=1.0),
        no_effect_values={"lm_head_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,)},
        unused_fields=(*TRAINING, "original_max_position_embeddings"),  # read by longrope
    ),
    Family(
        "smollm3",
        ("SmolLM3ForCausalLM",),
        defaults={"tie_word_embeddings": True},
        biases=of.named_biases,
        rotary=listed_rotary,
        rope=RopeRules(default={"rope_theta": 2_000_000.0}),
        unused_fields=TRAINING,
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
        windows=alternating_windows(4, full=0),
        rope=RopeRules(default=_CWM_ROPE),
        unused_fields=TRAINING,
    ),
    Family(
        "solar",
        ("SolarForCausalLM",),
        biases=of.named_biases,
        skips=solar_skips,
        unused_fields=TRAINING,
    ),
    Family(
        "olmo",
        ("OlmoForCausalLM",),
        defaults={"rms_norm_eps": 1e-5},  # whatever the config says
        layer_norm=True,
        norm_weights=False,
        norm_biases=False,
        biases=of.attention_biases,
        scales=of.bounded_scales,
    ),
    Family(
        "olmo2",
        ("Olmo2ForCausalLM",),
        norms=NORMS_AFTER,
        qk_norm=QKNorm(over_all_heads=True),
        biases=of.attention_biases,
    ),
    Family(
        "olmo3",
        ("Olmo3ForCausalLM",),
        defaults={"sliding_window": 4096},
        norms=NORMS_AFTER,
        qk_norm=QKNorm(over_all_heads=True),
        biases=of.attention_biases,
        windows=alternating_windows(4),
        rope=RopeRules(default={"rope_theta": 500_000.0}, local_theta=("rope_theta", 500_000.0)),
    ),
    Family(
        "gemma",
        ("GemmaForCausalLM",),
        defaults={"hidden_act": "gelu_pytorch_tanh"} | {name: _GEMMA[name] for name in _OF_GEMMA},
        norm_offset=True,
        biases=of.attention_biases,
        scales=of.embedding_scale,
        activations={**_GELU, "gelu": "gelu_tanh"},  # as transformers reads it
        no_effect_values={
            "hidden_activation": (None, "gelu_pytorch_tanh"),
            "use_bidirectional_attention": (False,),
        },
    ),
    Family(
        "vaultgemma",
        ("VaultGemmaForCausalLM",),
        defaults=_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        norms=NormNames(before_mlp="pre_feedforward_layernorm"),
        windows=alternating_windows(2),
        no_effect_values={"use_bidirectional_attention": (False,)},
        **_LIKE_GEMMA2,
    ),
    Family(
        "gemma2",
        ("Gemma2ForCausalLM",),
        defaults=_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        norms=_NORMS_AROUND,
        windows=alternating_windows(2),
        no_effect_values={"hidden_act": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)},
        unused_fields=("sliding_window_size",),  # the old name of sliding_window
        **_LIKE_GEMMA2,
    ),
    Family(
        "gemma3_text",
        ("Gemma3ForCausalLM",),
        defaults=_GEMMA | {"max_position_embeddings": 131_072, "vocab_size": 262_208},
        norms=_NORMS_AROUND,
        qk_norm=QKNorm(),
        windows=alternating_windows(6, named="sliding_window_pattern"),
        rope=RopeRules(default={"rope_theta": 1_000_000.0}, local_theta=("rope_local_base_freq", 10_000.0)),
        no_effect_values={"use_bidirectional_attention": (False,)},
        **_LIKE_GEMMA2,
    ),
    Family(
        "gemma4_text",
        ("Gemma4ForCausalLM",),
        defaults={
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "vocab_size": 262_144,
        },
        norms=_NORMS_AROUND,
        qk_norm=QKNorm(),
        biases=of.attention_biases,
        windows=ending_in_full(alternating_windows(6)),
        rope=RopeRules(default=_GEMMA4_ROPE, local_theta=("rope_local_base_freq", 10_000.0)),
        scales=gemma4_scales,
        variants=gemma4_layers,
        experts=experts.gemma4_experts,
        activations=_GELU,
        activation_field="hidden_activation",
        no_effect_values={"use_bidirectional_attention": ("vision",)},  # images attend in both directions
    ),
    Family(
        "glm",
        ("GlmForCausalLM",),
        defaults={"head_dim": 128, "rms_norm_eps": 1.5625e-07},
        biases=of.glm_biases,
        rope=RopeRules(partial=0.5, interleaved=True),
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
        norms=NORMS_AFTER,
        qk_norm=QKNorm(),
        windows=alternating_windows(4, named="sliding_window_pattern"),
        rotary=sliding_rotary,
    ),
    Family(
        "hunyuan_v1_dense",
        ("HunYuanDenseV1ForCausalLM",),
        qk_norm=QKNorm("query_layernorm", "key_layernorm", after_rotary=True),
        biases=of.attention_biases,
        no_effect_values=HUNYUAN_VALUES,
        unused_fields=HUNYUAN_UNUSED,
    ),
    Family(
        "ernie4_5",
        ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
        defaults={"head_dim": 128, "tie_word_embeddings": True},
        biases=of.one_bias,
        rope=RopeRules(default={"rope_theta": 500_000.0}, interleaved=True),
    ),
)
