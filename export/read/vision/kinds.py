"""What all towers of a family share: the names of their tensors, and what they compute."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class TowerKind:
    """Names of a tower's tensors, and choices.

    Those of a layer follow ``layer`` and its number. ``qkv``: one weight, or three. ``norms``: of the inputs of
    attention and MLP, and then of their outputs if these are normed, too. ``mlp``: up and down, or gate, up and down.
    ``head_norms``: of the queries and keys of each head; (): there are none. ``first_norm`` and ``last_norm``: of
    embedded patches, and after the last layer; "": there is none. ``parts``: what the merger has, in the order of its
    use; "joined" begins with a norm, or "".

    ``colours_last``: a patch has the colours of a pixel next to each other. ``rope``: how heads are rotated by row and
    column: "halves" as a whole, with equal frequencies for both; "alternating" as a whole, with every other frequency;
    "parts" in two parts, the first by column; None: not at all. ``unscaled``: scores of queries, which are normed, are
    not divided by the root of a head's size.
    """

    patches: str
    layer: str
    norms: tuple[str, ...]
    qkv: tuple[str, ...]
    out: str
    mlp: tuple[str, ...]
    parts: tuple[str, ...]
    positions: str = ""
    head_norms: tuple[str, ...] = ()
    first_norm: str = ""
    last_norm: str = ""
    merger: Literal["joined", "mean", "pooled", "matmul"] = "joined"
    rms_norms: bool = False
    biases: bool = True
    patch_bias: bool = True
    colours_last: bool = False
    rope: Literal["halves", "alternating", "parts"] | None = None
    unscaled: bool = False


_PROJECTOR = "multi_modal_projector."
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
QWEN3_VL = TowerKind(
    patches="patch_embed.proj", positions="pos_embed.weight", layer="blocks", norms=("norm1", "norm2"),
    qkv=("attn.qkv",), out="attn.proj", mlp=("mlp.linear_fc1", "mlp.linear_fc2"), last_norm="merger.norm",
    parts=("", "merger.linear_fc1", "merger.linear_fc2"), rope="halves",
)  # fmt: skip
QWEN2_5_VL = replace(
    QWEN3_VL, positions="", mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), last_norm="merger.ln_q",
    parts=("", "merger.mlp.0", "merger.mlp.2"), rms_norms=True, patch_bias=False,
)  # fmt: skip
SIGLIP = TowerKind(
    patches="embeddings.patch_embedding", positions="embeddings.position_embedding.weight", layer="encoder.layers",
    norms=("layer_norm1", "layer_norm2"), qkv=_PROJECTIONS, out="self_attn.out_proj", mlp=("mlp.fc1", "mlp.fc2"),
    last_norm="post_layernorm", merger="mean",
    parts=(f"{_PROJECTOR}mm_soft_emb_norm.weight", f"{_PROJECTOR}mm_input_projection_weight"),
)  # fmt: skip
IDEFICS3 = replace(SIGLIP, merger="joined", parts=("", "connector.modality_projection.proj"))
LFM2_VL = replace(
    IDEFICS3, parts=tuple(_PROJECTOR + part for part in ("layer_norm", "linear_1", "linear_2")), colours_last=True
)  # fmt: skip
GEMMA4 = TowerKind(
    patches="patch_embedder.input_proj", positions="patch_embedder.position_embedding_table", layer="encoder.layers",
    norms=("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"),
    qkv=tuple(f"{name}.linear" for name in _PROJECTIONS), out="self_attn.o_proj.linear",
    head_norms=("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    mlp=("mlp.gate_proj.linear", "mlp.up_proj.linear", "mlp.down_proj.linear"), merger="pooled",
    parts=("std_bias", "std_scale", "embed_vision.embedding_projection"), rms_norms=True, biases=False,
    patch_bias=False, colours_last=True, rope="parts", unscaled=True,
)  # fmt: skip
PIXTRAL = TowerKind(
    patches="patch_conv", first_norm="ln_pre", layer="transformer.layers", norms=("attention_norm", "ffn_norm"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"), out="attention.o_proj", merger="matmul",
    mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
    parts=tuple(_PROJECTOR + name for name in ("norm", "patch_merger.merging_layer", "linear_1", "linear_2")),
    rms_norms=True, biases=False, patch_bias=False, rope="alternating",
)  # fmt: skip
