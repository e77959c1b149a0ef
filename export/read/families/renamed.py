"""Families with the layers of Llama or another family here, and the tensor names of their own code."""

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read import family as of
from tandemrt.export.read.families import tensor_names
from tandemrt.export.read.families.common import TRAINING
from tandemrt.export.read.family import Biases, Family
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.layer import Scales
from tandemrt.export.read.rope import RopeRules


def _halved(fields: Fields) -> int:
    """Qwen 1: ``intermediate_size`` counts gate and up."""
    return fields.integer("intermediate_size") // 2


def _trained_length(fields: Fields) -> int:
    """Qwen 1 scales queries and rotary frequencies of longer texts only."""
    return fields.integer("seq_length", 8192)


def _telechat_length(fields: Fields) -> int:
    """TeleChat changes rotary frequencies of longer texts, or of all if it was extended after the first training."""
    base, trained = fields.integer("base_seqlen", 8192), fields.integer("training_seqlen", 8192)
    if base != trained:
        raise BadCheckpoint(
            f"config.json: training_seqlen should be base_seqlen, {base}, because rotary frequencies that depend on "
            f"both are not supported; it is {quoted(trained)}"
        )
    return trained


def _attention_bias(fields: Fields) -> Biases:
    attention = fields.flag("bias", True)
    return Biases(attention, attention)


def _qkv_bias(fields: Fields) -> Biases:  # noqa: ARG001
    return Biases(qkv=True)


def _telechat_biases(fields: Fields) -> Biases:  # noqa: ARG001
    return Biases(out=True, down=True)


def _teleflm_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    """TeleFLM: with ``use_mup`` embeddings and logits are scaled."""
    values = [fields.number(name, 1.0) for name in ("input_mult", "output_mult", "mup_scale_factor")]
    embedding, output, width = values if fields.flag("use_mup", False) else (1.0, 1.0, 1.0)
    return Scales(attention=head_dim**-0.5, embedding=embedding, logits=width / output)


ROWS = (
    Family(
        "internlm",
        ("InternLMForCausalLM", "PanguEmbeddedForCausalLM"),
        aliases=("PanguEmbedded",),
        biases=_attention_bias,
    ),
    Family(
        "internlm2",
        ("InternLM2ForCausalLM",),
        tensor_names=tensor_names.INTERNLM2,
        biases=_attention_bias,
        stored_by_head=("q", "k", "v"),
        unused_fields=(*TRAINING, "attn_implementation"),
    ),
    Family(
        "baichuan",  # 7B; 13B has no rotary embedding, and no max_position_embeddings
        ("BaiChuanForCausalLM",),
        tensor_names=tensor_names.BAICHUAN,
        unused_fields=("gradient_checkpointing", "model_max_length"),
    ),
    Family(
        "baichuan2",
        ("BaichuanForCausalLM",),
        aliases=("baichuan",),
        tensor_names=tensor_names.BAICHUAN,
        normed_head=True,
        unused_fields=("gradient_checkpointing", "model_max_length", "z_loss_weight", "_from_model_config"),
    ),
    Family(
        "qwen",
        ("QWenLMHeadModel",),
        tensor_names=tensor_names.QWEN,
        field_names={"kv_channels": "head_dim", "rotary_emb_base": "rope_theta"},
        intermediate=_halved,
        norm_eps_field="layer_norm_epsilon",
        biases=_qkv_bias,
        longest=_trained_length,
        no_effect_values={
            "no_bias": (True,),
            "rotary_pct": (1.0,),
            "scale_attn_weights": (True,),
            "use_dynamic_ntk": (True, False),
            "use_logn_attn": (True, False),
        },
        unused_fields=(
            *("attn_dropout_prob", "emb_dropout_prob", "bf16", "fp16", "fp32", "onnx_safe", "softmax_in_fp32"),
            *("tokenizer_type", "use_cache_kernel", "use_cache_quantization", "use_flash_attn"),
        ),
    ),
    Family(
        "chatglm",
        ("ChatGLMModel", "ChatGLMForConditionalGeneration"),
        tensor_names=tensor_names.CHATGLM,
        field_names={
            "add_qkv_bias": "attention_bias",
            "ffn_hidden_size": "intermediate_size",
            "kv_channels": "head_dim",
            "multi_query_group_num": "num_key_value_heads",
            "num_layers": "num_hidden_layers",
            "padded_vocab_size": "vocab_size",
            "seq_length": "max_position_embeddings",
        },
        norm_eps_field="layernorm_epsilon",
        biases=of.qkv_biases_if_configured,
        rope=RopeRules(partial=0.5, interleaved=True, theta_factor="rope_ratio"),
        no_effect_values={
            **dict.fromkeys(("multi_query_attention", "original_rope", "post_layer_norm", "rmsnorm"), (True,)),
            **dict.fromkeys(
                ("add_bias_linear", "apply_residual_connection_post_layernorm", "prefix_projection"), (False,)
            ),
            "quantization_bit": (0,),
        },
        unused_fields=(
            *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion"),
            *("classifier_dropout", "fp32_residual_connection", "hidden_dropout"),
        ),
    ),
    Family(
        "exaone",
        ("ExaoneForCausalLM",),
        tensor_names=tensor_names.EXAONE,
        field_names={"num_layers": "num_hidden_layers"},
        norm_eps_field="layer_norm_epsilon",
        activation_field="activation_function",
        unused_fields=("embed_dropout",),
    ),
    Family(
        "telechat",
        ("TeleChatForCausalLM", "TeleChat2ForCausalLM"),
        tensor_names=tensor_names.TELECHAT,
        field_names={
            "ffn_hidden_size": "intermediate_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "seq_length": "max_position_embeddings",
        },
        norm_eps_field="layer_norm_epsilon",
        biases=_telechat_biases,
        stored_by_head=("k", "v"),
        longest=_telechat_length,
        no_effect_values={
            **dict.fromkeys(("apply_residual_connection_post_layernorm", "embed_layernorm"), (False,)),
            "logn": (True, False),  # for texts longer than the trained length
        },
        unused_fields=(*("flash_attn", "hidden_dropout", "seed", "skip_bias_add"),),
    ),
    Family(
        "orion",
        ("OrionForCausalLM",),
        layer_norm=True,
        unused_fields=(*TRAINING, "max_sequence_length"),
    ),
    Family(
        "teleflm",
        ("TeleFLMForCausalLM",),
        scales=_teleflm_scales,
        unused_fields=TRAINING,
    ),
)
