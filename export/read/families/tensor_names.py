"""Names of tensors that only one kind of family has: a pattern, and the common name (export/read/tensors.py)."""

import re

LFM = (
    (re.compile(r"^model\.embedding_norm\."), "model.norm."),
    (re.compile(r"\.conv\.conv\."), ".conv.conv1d."),
    (re.compile(r"\.self_attn\.out_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.self_attn\.gate_proj\."), ".self_attn.g_proj."),
    (re.compile(r"\.feed_forward\."), ".mlp."),
    (re.compile(r"\.mlp\.w1\."), ".mlp.gate_proj."),
    (re.compile(r"\.mlp\.w3\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.w2\."), ".mlp.down_proj."),
)
BAMBA = (
    (re.compile(r"^model\.final_layernorm\."), "model.norm."),
    (re.compile(r"\.feed_forward\."), ".mlp."),
)
OLMO = (
    (re.compile(r"\.attention_layer_norm\."), ".input_layernorm."),
    (re.compile(r"\.feedforward_layer_norm\."), ".post_attention_layernorm."),
    (re.compile(r"\.linear_attn\.o_proj\."), ".linear_attn.out_proj."),
    (re.compile(r"\.linear_attn\.o_norm\."), ".linear_attn.norm."),
    (re.compile(r"\.linear_attn\.g_proj\."), ".linear_attn.in_proj_z."),
    (re.compile(r"\.linear_attn\.([ab])_proj\."), r".linear_attn.in_proj_\1."),
)
NEMOTRON = (
    (re.compile(r"^backbone\."), "model."),
    (re.compile(r"^model\.embeddings\."), "model.embed_tokens."),
    (re.compile(r"^model\.norm_f\."), "model.norm."),
)
BAILING = (
    (re.compile(r"^model\.word_embeddings\."), "model.embed_tokens."),
    (re.compile(r"\.attention\.query_key_value\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.attention\.dense\."), ".self_attn.o_proj."),
    (re.compile(r"\.attention\."), ".self_attn."),
)
STARCODER = (
    (re.compile(r"\.mlp\.c_fc\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.c_proj\."), ".mlp.down_proj."),
)
STEP = (
    (re.compile(r"\.moe\.router_bias$"), ".mlp.gate.e_score_correction_bias"),
    (re.compile(r"\.moe\.gate\."), ".mlp.gate."),
    (re.compile(r"\.moe\.(gate_proj|up_proj|down_proj)\.weight$"), r".mlp.experts.\1"),
    (re.compile(r"(\.layers\.\d+)\.share_expert\."), r"\1.mlp.shared_experts."),
)
_DENSE = (
    (re.compile(r"\.self_attn\.query_key_value\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.self_attn\.dense\."), ".self_attn.o_proj."),
    (re.compile(r"\.mlp\.dense_h_to_4h\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.dense_4h_to_h\."), ".mlp.down_proj."),
)
_GPT = (
    (re.compile(r"^(?:transformer\.)?(?:wte|word_embeddings)\."), "model.embed_tokens."),
    (re.compile(r"^(?:transformer\.)?ln_f\."), "model.norm."),
    (re.compile(r"^(?:transformer\.)?h\."), "model.layers."),
    (re.compile(r"\.ln_1\."), ".input_layernorm."),
    (re.compile(r"\.ln_2\."), ".post_attention_layernorm."),
    (re.compile(r"(\.layers\.\d+)\.(?:attn|self_attention)\."), r"\1.self_attn."),
)
GPT_NEOX = (
    (re.compile(r"^gpt_neox\.embed_in\."), "model.embed_tokens."),
    (re.compile(r"^gpt_neox\.final_layer_norm\."), "model.norm."),
    (re.compile(r"^gpt_neox\."), "model."),
    (re.compile(r"^embed_out\."), "lm_head."),
    (re.compile(r"\.attention\."), ".self_attn."),
    *_DENSE,
)
GPTJ = (
    *_GPT,
    (re.compile(r"\.self_attn\.out_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.mlp\.fc_in\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.fc_out\."), ".mlp.down_proj."),
)
FALCON = (*_GPT, *_DENSE)
PHI = (
    (re.compile(r"^model\.final_layernorm\."), "model.norm."),
    (re.compile(r"\.self_attn\.dense\."), ".self_attn.o_proj."),
    (re.compile(r"\.mlp\.fc1\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.fc2\."), ".mlp.down_proj."),
)
INTERNLM2 = (
    (re.compile(r"^model\.tok_embeddings\."), "model.embed_tokens."),
    (re.compile(r"^output\."), "lm_head."),
    (re.compile(r"\.attention_norm\."), ".input_layernorm."),
    (re.compile(r"\.ffn_norm\."), ".post_attention_layernorm."),
    (re.compile(r"\.attention\.wqkv\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.attention\.wo\."), ".self_attn.o_proj."),
    (re.compile(r"\.feed_forward\.w1\."), ".mlp.gate_proj."),
    (re.compile(r"\.feed_forward\.w3\."), ".mlp.up_proj."),
    (re.compile(r"\.feed_forward\.w2\."), ".mlp.down_proj."),
)
BAICHUAN = ((re.compile(r"\.self_attn\.W_pack\."), ".self_attn.qkv_proj."),)
QWEN = (
    *_GPT,
    (re.compile(r"\.self_attn\.c_attn\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.self_attn\.c_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.mlp\.w2\."), ".mlp.gate_proj."),
    (re.compile(r"\.mlp\.w1\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.c_proj\."), ".mlp.down_proj."),
)
CHATGLM = (
    # The name of frequencies that a graph derives from the config (export/graph/weights.py).
    (re.compile(r"^transformer\.rotary_pos_emb\."), "model.layers.0.self_attn.rotary_emb."),
    (re.compile(r"^transformer\.embedding\.word_embeddings\."), "model.embed_tokens."),
    (re.compile(r"^transformer\.encoder\.final_layernorm\."), "model.norm."),
    (re.compile(r"^transformer\.encoder\.layers\."), "model.layers."),
    (re.compile(r"^transformer\.output_layer\."), "lm_head."),
    (re.compile(r"\.self_attention\."), ".self_attn."),
    (re.compile(r"\.mlp\.dense_h_to_4h\."), ".mlp.gate_up_proj."),
    *_DENSE,
)
EXAONE = (
    *_GPT,
    (re.compile(r"\.self_attn\.attention\."), ".self_attn."),
    (re.compile(r"\.self_attn\.out_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.mlp\.c_fc_0\."), ".mlp.gate_proj."),
    (re.compile(r"\.mlp\.c_fc_1\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.c_proj\."), ".mlp.down_proj."),
)
TELECHAT = (
    *_GPT,
    *_DENSE,
    (re.compile(r"\.self_attn\.query\."), ".self_attn.q_proj."),
    (re.compile(r"\.self_attn\.key_value\."), ".self_attn.kv_proj."),
)
PERSIMMON = ((re.compile(r"^model\.final_layernorm\."), "model.norm."), *_DENSE)
AFMOE = ((re.compile(r"\.self_attn\.gate_proj\."), ".self_attn.g_proj."),)
GPT_BIGCODE = (
    *_GPT,
    (re.compile(r"^(?:transformer\.)?wpe\."), "model.embed_positions."),
    (re.compile(r"\.self_attn\.c_attn\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.self_attn\.c_proj\."), ".self_attn.o_proj."),
    *STARCODER,
)
OPT = (
    (re.compile(r"^model\.decoder\.final_layer_norm\."), "model.norm."),
    (re.compile(r"^model\.decoder\."), "model."),
    (re.compile(r"\.self_attn_layer_norm\."), ".input_layernorm."),
    (re.compile(r"\.final_layer_norm\."), ".post_attention_layernorm."),
    (re.compile(r"\.self_attn\.out_proj\."), ".self_attn.o_proj."),
    (re.compile(r"(\.layers\.\d+)\.fc1\."), r"\1.mlp.up_proj."),
    (re.compile(r"(\.layers\.\d+)\.fc2\."), r"\1.mlp.down_proj."),
)
