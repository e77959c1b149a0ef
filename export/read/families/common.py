"""Values that families of several kinds share."""

from collections.abc import Mapping
from typing import Any

from tandemrt.export.read.layer import Activation, NormNames

NORMS_AFTER = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
NORMS_AROUND_MLP = NormNames("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
TRAINING = ("residual_dropout", "resid_pdrop", "embd_pdrop", "pretraining_tp")  # transformers never reads the last one
ROUTER = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # training only
# Training, placement, MTP.
DEEPSEEK = (*ROUTER, "pretraining_tp", "aux_loss_alpha", "seq_aux", "ep_size", "num_mtp_layers")
GELU: Mapping[str, Activation] = {"gelu": "gelu"}
GELU_TANH: Mapping[str, Activation] = dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh")
# The config fields of Ling 2.0, by DeepSeek's names.
LING_FIELDS = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "score_function": "scoring_func",
}
# The config fields of GPT-2, which later families of its time have, too.
GPT_FIELDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
GPT_UNUSED = (
    *TRAINING,
    *("attn_pdrop", "gradient_checkpointing", "n_ctx", "summary_activation", "summary_first_dropout"),
    *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
)
HUNYUAN_VALUES: dict[str, tuple[Any, ...]] = {
    "add_classification_head": (False,),
    "norm_type": ("rms",),
    "use_cla": (False,),
    "use_qk_norm": (True,),
    "use_rotary_pos_emb": (True,),
}
HUNYUAN_UNUSED = (
    *TRAINING,
    *("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "eod_token_id", "org_vocab_size"),
    *("pad_id", "pool_type", "mask_init_id", "im_start_id", "im_end_id", "im_newline_id", "sep_token_id"),
)
