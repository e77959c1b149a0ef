"""Families that transformers lacks give the logits of one with the same layers, whose tensors they store otherwise."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from tests.engine.decoding import Decoder, edit_config, expected_logits, make_checkpoint

Tensors = dict[str, torch.Tensor]
HEADS = 2  # of keys and values
TEXT = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(7)).tolist()
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 61,
}
GPT = {
    r"^model\.embed_tokens\.": "transformer.wte.",
    r"^model\.norm\.": "transformer.ln_f.",
    r"^model\.layers\.": "transformer.h.",
    r"\.input_layernorm\.": ".ln_1.",
    r"\.post_attention_layernorm\.": ".ln_2.",
}

MIXTURE = {  # names of Granite's shared and other experts in those of most families
    r"\.block_sparse_moe\.router\.layer\.": ".mlp.gate.",
    r"\.block_sparse_moe\.input_linear\.weight": ".mlp.experts.gate_up_proj",
    r"\.block_sparse_moe\.output_linear\.weight": ".mlp.experts.down_proj",
    r"\.shared_mlp\.input_linear\.": ".mlp.shared_experts.gate_up_proj.",
    r"\.shared_mlp\.output_linear\.": ".mlp.shared_experts.down_proj.",
}
GRANITE_MIXTURE = {
    "intermediate_size": 24,
    "shared_intermediate_size": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
}
LATENT: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "rope_interleave": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
    "topk_group": 1,
    "v_head_dim": 16,
}


@dataclass(frozen=True)
class Relative:
    """A family in terms of ``model_type`` with ``fields``: its own config ``own``, and ``names`` of tensors.

    ``joined``: the name of the tensor of an attention that holds ``kinds``, one after the other or ``by_head``.
    ``without``: a pattern of biases that are zeros in the relative, and not stored. ``normed_head``: the rows of the
    relative's head have length 1, and those that are stored other lengths.
    """

    model_type: str
    own: Mapping[str, Any]
    names: Mapping[str, str]
    fields: Mapping[str, Any] = field(default_factory=dict)
    kinds: str = ""
    joined: str = ""
    by_head: bool = False
    without: str | None = None
    normed_head: bool = False


def layers(**names: str) -> dict[str, Any]:
    return {names.get("layers", "num_hidden_layers"): 2, names.get("heads", "num_attention_heads"): 4}


RELATIVES = {
    "OrionForCausalLM": Relative(
        "stablelm",
        SIZES | layers() | {"model_type": "orion", "num_key_value_heads": HEADS, "attention_bias": False},
        {},
        {"partial_rotary_factor": 1.0, "layer_norm_eps": 1e-6},
    ),
    "PanguEmbeddedForCausalLM": Relative(
        "llama",
        SIZES | layers() | {"model_type": "PanguEmbedded", "num_key_value_heads": HEADS, "bias": True},
        {},
        {"attention_bias": True},
    ),
    "MiMoForCausalLM": Relative(
        "qwen2",
        SIZES | layers() | {"model_type": "mimo", "num_key_value_heads": HEADS, "use_sliding_window": False},
        {},
    ),
    "DeepseekV32ForCausalLM": Relative(
        "deepseek_v3",
        {**SIZES, **layers(), **LATENT, "model_type": "deepseek_v32", "num_key_value_heads": 4}
        | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
        {},
        {**LATENT, "num_key_value_heads": 4},
    ),
    "DeepseekForCausalLM": Relative(
        "granitemoeshared",
        SIZES
        | layers()
        | {"model_type": "deepseek", "num_key_value_heads": HEADS, "moe_intermediate_size": 24, "n_routed_experts": 6}
        | {"num_experts_per_tok": 3, "n_shared_experts": 2, "norm_topk_prob": True, "first_k_dense_replace": 0},
        MIXTURE,
        GRANITE_MIXTURE,
    ),
    "TeleFLMForCausalLM": Relative(
        "granite",
        SIZES
        | layers()
        | {"model_type": "teleflm", "num_key_value_heads": HEADS, "attention_bias": False, "mlp_bias": False}
        | {"use_mup": True, "input_mult": 3.0, "output_mult": 8.0, "mup_scale_factor": 2.0},
        {},
        {"embedding_multiplier": 3.0, "logits_scaling": 0.25, "attention_multiplier": 0.25},
    ),
    "InternLM2ForCausalLM": Relative(
        "llama",
        SIZES
        | layers()
        | {"model_type": "internlm2", "num_key_value_heads": HEADS, "bias": False, "hidden_act": "silu"},
        {
            r"^model\.embed_tokens\.": "model.tok_embeddings.",
            r"^lm_head\.": "output.",
            r"\.input_layernorm\.": ".attention_norm.",
            r"\.post_attention_layernorm\.": ".ffn_norm.",
            r"\.self_attn\.o_proj\.": ".attention.wo.",
            r"\.self_attn\.": ".attention.",
            r"\.mlp\.gate_proj\.": ".feed_forward.w1.",
            r"\.mlp\.up_proj\.": ".feed_forward.w3.",
            r"\.mlp\.down_proj\.": ".feed_forward.w2.",
        },
        kinds="qkv",
        joined="wqkv",
        by_head=True,
    ),
    "BaichuanForCausalLM": Relative(
        "llama",
        SIZES | layers() | {"model_type": "baichuan", "model_max_length": 128, "z_loss_weight": 0},
        {},
        {"num_key_value_heads": 4},
        kinds="qkv",
        joined="W_pack",
        normed_head=True,
    ),
    "QWenLMHeadModel": Relative(
        "qwen2",
        SIZES
        | layers()
        | {
            "model_type": "qwen",
            "intermediate_size": 80,
            "kv_channels": 16,
            "layer_norm_epsilon": 1e-6,
            "rms_norm_eps": None,
        }
        | {"no_bias": True, "seq_length": 64, "use_dynamic_ntk": True, "use_logn_attn": True, "rotary_emb_base": 10000},
        GPT
        | {
            r"\.self_attn\.o_proj\.": ".attn.c_proj.",
            r"\.self_attn\.": ".attn.",
            r"\.mlp\.gate_proj\.": ".mlp.w2.",
            r"\.mlp\.up_proj\.": ".mlp.w1.",
            r"\.mlp\.down_proj\.": ".mlp.c_proj.",
        },
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-6},
        kinds="qkv",
        joined="c_attn",
    ),
    "ChatGLMModel": Relative(
        "glm",
        layers(layers="num_layers")
        | {"model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True, "ffn_hidden_size": 40}
        | {"hidden_size": 64, "kv_channels": 16, "layernorm_epsilon": 1e-5, "multi_query_attention": True}
        | {"multi_query_group_num": HEADS, "original_rope": True, "padded_vocab_size": 61, "post_layer_norm": True}
        | {"rmsnorm": True, "rope_ratio": 0.5, "seq_length": 128},
        {
            r"^model\.embed_tokens\.": "transformer.embedding.word_embeddings.",
            r"^model\.norm\.": "transformer.encoder.final_layernorm.",
            r"^model\.layers\.": "transformer.encoder.layers.",
            r"^lm_head\.": "transformer.output_layer.",
            r"\.self_attn\.o_proj\.": ".self_attention.dense.",
            r"\.self_attn\.": ".self_attention.",
            r"\.mlp\.gate_up_proj\.": ".mlp.dense_h_to_4h.",
            r"\.mlp\.down_proj\.": ".mlp.dense_4h_to_h.",
        },
        {"head_dim": 16, "attention_bias": True, "rms_norm_eps": 1e-5, "num_key_value_heads": HEADS}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}},
        kinds="qkv",
        joined="query_key_value",
    ),
    "ExaoneForCausalLM": Relative(
        "llama",
        SIZES
        | layers(layers="num_layers")
        | {
            "model_type": "exaone",
            "activation_function": "silu",
            "layer_norm_epsilon": 1e-6,
            "num_key_value_heads": HEADS,
            "rms_norm_eps": None,
        },
        GPT
        | {
            r"\.self_attn\.o_proj\.": ".attn.attention.out_proj.",
            r"\.self_attn\.": ".attn.attention.",
            r"\.mlp\.gate_proj\.": ".mlp.c_fc_0.",
            r"\.mlp\.up_proj\.": ".mlp.c_fc_1.",
            r"\.mlp\.down_proj\.": ".mlp.c_proj.",
        },
    ),
    "TeleChat2ForCausalLM": Relative(
        "llama",
        layers(layers="n_layer", heads="n_head")
        | {"model_type": "telechat", "hidden_size": 64, "ffn_hidden_size": 40, "vocab_size": 61, "seq_length": 128}
        | {"layer_norm_epsilon": 1e-6, "num_key_value_heads": HEADS, "base_seqlen": 64, "training_seqlen": 64},
        {
            r"^model\.embed_tokens\.": "transformer.word_embeddings.",
            r"^model\.norm\.": "transformer.ln_f.",
            r"^model\.layers\.": "transformer.h.",
            r"\.self_attn\.o_proj\.": ".self_attention.dense.",
            r"\.self_attn\.q_proj\.": ".self_attention.query.",
            r"\.self_attn\.": ".self_attention.",
        },
        {"attention_bias": True, "mlp_bias": True},
        kinds="kv",
        joined="key_value",
        by_head=True,
        without=r"\.(?:[qkv]|gate|up)_proj\.bias$",
    ),
    "BailingMoeForCausalLM": Relative(
        "granitemoeshared",
        SIZES
        | layers()
        | {"model_type": "bailing_moe", "num_key_value_heads": HEADS, "moe_intermediate_size": 24, "num_experts": 6}
        | {"num_experts_per_tok": 3, "num_shared_experts": 2, "norm_topk_prob": True, "rope_theta": 10000.0},
        {
            r"^model\.embed_tokens\.": "model.word_embeddings.",
            r"\.self_attn\.o_proj\.": ".attention.dense.",
            r"\.self_attn\.": ".attention.",
        }
        | MIXTURE,
        GRANITE_MIXTURE,
        kinds="qkv",
        joined="query_key_value",
    ),
}


@pytest.mark.parametrize("architecture", RELATIVES)
def test_logits_equal_those_of_a_family_with_the_same_layers(architecture: str, tmp_path: Path) -> None:
    relative = RELATIVES[architecture]
    fields = {**SIZES, **layers(), "num_key_value_heads": HEADS, "pad_token_id": None, **relative.fields}
    model = make_checkpoint(AutoConfig.for_model(relative.model_type, **fields), tmp_path / "relative")
    tensors = prepared(model, relative, tmp_path / "relative")
    save_file({renamed(name, relative): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**relative.own, "architectures": [architecture]}))
    logits = Decoder(tmp_path, "grouped", batch=1, capacity=48)([TEXT], [0])[0]
    torch.testing.assert_close(logits, expected_logits(model, TEXT), atol=1e-4, rtol=0)


def test_a_stream_is_mixed_into_that_of_a_later_layer(tmp_path: Path) -> None:
    """Solar: its layers are Llama's, and transformers' Llama mixes the streams by hooks."""
    fields = {**SIZES, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": HEADS}
    model = make_checkpoint(AutoConfig.for_model("llama", **fields, pad_token_id=None), tmp_path)
    skips = {"bskcn_1": [1], "bskcn_2": [2], "bskcn_3": [3], "bskcn_4": [3], "bskcn_tv": [0.9, 0.3]}
    edit_config(tmp_path, architectures=["SolarForCausalLM"], model_type="solar", **skips)
    streams: list[torch.Tensor] = []

    def keep(_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        streams.append(inputs[0])

    def mix(_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        stream = inputs[0]
        for earlier in streams:
            stream = 0.3 * earlier + 0.7 * stream
        return stream, *inputs[1:]

    for layer, hook in ((1, keep), (2, keep), (3, mix)):
        model.model.layers[layer].register_forward_pre_hook(hook)
    expected = expected_logits(model, TEXT)
    logits = Decoder(tmp_path, "grouped", batch=1, capacity=48)([TEXT], [0])[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def prepared(model: PreTrainedModel, relative: Relative, folder: Path) -> Tensors:
    """Change the model so that the family can compute what it does, and return the tensors that the family stores."""
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if relative.without is not None and re.search(relative.without, name):
                parameter.zero_()
        if relative.normed_head:
            head.copy_(torch.nn.functional.normalize(head))
    model.save_pretrained(folder)
    tensors: Tensors = load_file(folder / "model.safetensors")
    if relative.normed_head:
        tensors["lm_head.weight"] *= torch.linspace(0.5, 3.0, len(head))[:, None]
    if relative.without is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if not re.search(relative.without, name)}
    for first in [name for name in tensors if f".{relative.kinds[:1]}_proj." in name and relative.kinds]:
        attention, kind = re.split(r"\.[qk]_proj\.", first)
        parts = [tensors.pop(f"{attention}.{each}_proj.{kind}") for each in relative.kinds]
        if relative.by_head:
            parts = [part.reshape(HEADS, -1, *part.shape[1:]) for part in parts]
        joined = torch.cat(parts, dim=int(relative.by_head))
        tensors[f"{attention}.{relative.joined}.{kind}"] = joined.flatten(0, 1) if relative.by_head else joined
    return tensors


def renamed(name: str, relative: Relative) -> str:
    for stored, own in relative.names.items():
        name = re.sub(stored, own, name)
    return name
