"""Families with recurrent layers: delta nets, Mamba-2, short convolutions."""

from typing import Any

from tandemrt.export.read import experts
from tandemrt.export.read import family as of
from tandemrt.export.read.families import tensor_names
from tandemrt.export.read.families.common import DEEPSEEK, NORMS_AFTER, ROUTER
from tandemrt.export.read.family import Family
from tandemrt.export.read.latent import latent
from tandemrt.export.read.layer import NormNames, QKNorm
from tandemrt.export.read.layer_kinds import (
    configured_rotary,
    hybrid_window,
    lfm3_windows,
    no_rotary,
    rotary_if_configured,
)
from tandemrt.export.read.recurrent import (
    bamba_mamba2,
    delta_net,
    falcon_mamba2,
    granite_mamba2,
    joined_delta_net,
    kimi_delta,
    lfm3_convolution,
    nemotron_count,
    nemotron_mamba2,
    nemotron_mlps,
    olmo_delta_net,
    short_convolution,
)
from tandemrt.export.read.rope import RopeRules
from tandemrt.export.read.variants import lfm3_attention

_MTP = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")  # states are always float32
_QWEN: dict[str, Any] = {
    "norm_offset": True,
    "qk_norm": QKNorm(),
    "gated_attention": True,
    "windows": hybrid_window,
    "rope": RopeRules(partial=0.25),
}
_QWEN_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_QWEN_GATES: dict[str, tuple[Any, ...]] = {"attn_output_gate": (True,), "output_gate_type": ("swish", "silu")}
_MAMBA_UNUSED = ("mamba_chunk_size", "num_logits_to_keep")
_LFM_UNUSED = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
    *("conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta"),
)
_LFM: dict[str, Any] = {
    "tensor_names": tensor_names.LFM,
    "norms": NormNames("operator_norm", None, "ffn_norm", None),
    "norm_eps_field": "norm_eps",
    "qk_norm": QKNorm("q_layernorm", "k_layernorm"),
    "recurrent": short_convolution,
    "windows": hybrid_window,
    "rope": RopeRules(default={"rope_theta": 1_000_000.0}),
    "no_effect_values": {"tie_embedding": (True,), "use_pos_enc": (True,), "block_use_swiglu": (True,)},
}
_LFM3_ROPE = {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}

ROWS = (
    Family(
        "qwen3_5_text",
        ("Qwen3_5ForCausalLM",),
        defaults={"head_dim": 256, "rms_norm_eps": 1e-6},
        recurrent=delta_net,
        no_effect_values=_QWEN_GATES | {"mlp_only_layers": ([],)},
        unused_fields=_MTP,
        **_QWEN,
    ),
    Family(
        "qwen3_5_moe_text",
        ("Qwen3_5MoeForCausalLM",),
        # Every layer has experts, so configs have no intermediate_size; their weights are always normalized.
        defaults={"head_dim": 256, "intermediate_size": 512, "norm_topk_prob": True, "rms_norm_eps": 1e-6}
        | {"num_local_experts": 256, **_QWEN_EXPERTS},
        recurrent=delta_net,
        no_effect_values=_QWEN_GATES,
        unused_fields=(*_MTP, *ROUTER),
        experts=experts.qwen2_experts,
        **_QWEN,
    ),
    Family(
        "qwen3_next",
        ("Qwen3NextForCausalLM",),
        defaults={"head_dim": 256, "norm_topk_prob": True}
        | {"num_local_experts": 512, "num_experts_per_tok": 10, **_QWEN_EXPERTS},
        recurrent=joined_delta_net,
        unused_fields=(*_MTP, *ROUTER),
        experts=experts.qwen2_experts,
        **_QWEN,
    ),
    Family(
        "lfm2",
        ("Lfm2ForCausalLM",),
        defaults={"tie_word_embeddings": True},
        intermediate=of.adjusted_intermediate_size,
        unused_fields=_LFM_UNUSED,
        **_LFM,
    ),
    Family(
        "lfm2_moe",
        ("Lfm2MoeForCausalLM",),
        defaults={"tie_word_embeddings": True},
        experts=experts.lfm2_experts,
        unused_fields=(*_LFM_UNUSED, *ROUTER),
        **_LFM,
    ),
    Family(
        "lfm3",
        ("Lfm3ForCausalLM",),
        tensor_names=tensor_names.LFM,
        defaults={"head_dim": 128, "num_key_value_heads": 4, "sliding_window": 256, "tie_word_embeddings": True}
        | {"norm_eps": 1e-5},
        norms=NormNames("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
        norm_eps_field="norm_eps",
        qk_norm=QKNorm(),
        biases=of.attention_biases,
        recurrent=lfm3_convolution,
        windows=lfm3_windows,
        rope=RopeRules(default=_LFM3_ROPE, local_theta=("rope_local_base_freq", 10_000.0)),
        variants=lfm3_attention,
        no_effect_values={"use_sandwich_norm": (True,)},
    ),
    Family(
        "granitemoehybrid",
        ("GraniteMoeHybridForCausalLM",),
        defaults={"shared_intermediate_size": 1024},
        intermediate=of.granite_intermediate_size,
        biases=of.attention_biases,
        scales=of.granite_scales,
        rotary=configured_rotary,
        recurrent=granite_mamba2,
        windows=hybrid_window,
        no_effect_values={"normalization_function": ("rmsnorm",)},
        unused_fields=(*_MAMBA_UNUSED, *ROUTER, "init_method"),
        experts=experts.granite_hybrid_experts,
    ),
    Family(
        "bamba",
        ("BambaForCausalLM",),
        tensor_names=tensor_names.BAMBA,
        norms=NormNames(before_mlp="pre_ff_layernorm"),
        biases=of.named_biases,
        rope=RopeRules(partial=0.5, rotated_field="attn_rotary_emb"),
        recurrent=bamba_mamba2,
        windows=hybrid_window,
        unused_fields=(*_MAMBA_UNUSED, "z_loss_coefficient"),
    ),
    Family(
        "falcon_h1",
        ("FalconH1ForCausalLM",),
        tensor_names=tensor_names.BAMBA,
        norms=NormNames(before_mlp="pre_ff_layernorm"),
        biases=of.named_biases,
        scales=of.falcon_scales,
        recurrent=falcon_mamba2,
        windows=hybrid_window,
        no_effect_values={"attn_layer_indices": (None,), "mamba_use_mlp": (True,)},
        unused_fields=(*_MAMBA_UNUSED, "mlp_expansion_factor"),
    ),
    Family(
        "nemotron_h",
        ("NemotronHForCausalLM",),
        tensor_names=tensor_names.NEMOTRON,
        one_part_per_block=True,
        defaults={"head_dim": 128, "num_key_value_heads": 8, "intermediate_size": 21_504},
        field_names={"attention_head_dim": "head_dim", "rms_norm_eps": "layer_norm_epsilon"},
        norm_eps_field="layer_norm_epsilon",
        layers=nemotron_count,
        mlp_layers=nemotron_mlps,
        biases=of.named_biases,
        rotary=no_rotary,
        recurrent=nemotron_mamba2,
        windows=hybrid_window,
        activations={"relu2": "relu2"},
        activation_field="mlp_hidden_act",
        gated=False,
        no_effect_values={"mamba_ssm_cache_dtype": ("float32",)},  # states are always float32
        unused_fields=(
            *(*_MTP, *ROUTER, *_MAMBA_UNUSED, "chunk_size", "use_mamba_kernels", "rope_parameters", "rope_theta"),
            *(f"time_step_{kind}" for kind in ("min", "max", "floor", "rank")),
            *("residual_in_fp32", "hidden_dropout", "rescale_prenorm_residual", "moe_shared_expert_overlap"),
            *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "keep_mtp_spec_in_bf16"),
        ),
        experts=experts.nemotron_experts,
    ),
    Family(
        "olmo_hybrid",
        ("OlmoHybridForCausalLM",),
        tensor_names=tensor_names.OLMO,
        norms=NORMS_AFTER,
        recurrent_norms=NormNames(),
        qk_norm=QKNorm(over_all_heads=True),
        biases=of.attention_biases,
        rotary=rotary_if_configured,
        recurrent=olmo_delta_net,
        windows=hybrid_window,
        unused_fields=tuple(
            f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")
        ),
    ),
    Family(
        "kimi_linear",
        ("KimiLinearForCausalLM",),
        defaults={
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024,
            "n_group": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.446,
            "topk_group": 1,
        },
        field_names={
            "model_max_length": "max_position_embeddings",
            "moe_renormalize": "norm_topk_prob",
            "moe_router_activation_func": "scoring_func",
            "num_expert_group": "n_group",
            "num_experts": "n_routed_experts",
            "num_local_experts": "n_routed_experts",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
        },
        latent=latent,
        biases=of.latent_biases,
        rotary=no_rotary,
        recurrent=kimi_delta,
        windows=hybrid_window,
        no_effect_values={"mla_use_nope": (True,), "use_grouped_topk": (True,)},
        unused_fields=(*DEEPSEEK, "rope_theta", "rope_scaling", "rope_parameters"),
        experts=experts.deepseek_experts(),
    ),
)
