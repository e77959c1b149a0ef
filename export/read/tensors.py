"""Rename the tensors of a checkpoint to the names that the graph uses."""

import re
from dataclasses import replace

from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.families.registry import BY_NAME
from tandemrt.export.read.fused_tensors import parts_of, stores_transposed_experts
from tandemrt.export.read.mtp import mtp_prefixes, of_index
from tandemrt.export.read.recurrent_layers import KimiDelta
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.vision_language import text_config, text_tensor, vision_language

# Names of families for the router, its correction, experts and shared experts: pattern -> the common name.
_COMMON = (
    (re.compile(r"(\.layers\.\d+)\.feed_forward\."), r"\1.mlp."),  # Llama 4
    (re.compile(r"\.self_attn\.(?:attention_sink_bias|softmax_offset)"), ".self_attn.sinks"),  # MiMo V2, Flint
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),  # Mixtral, MiniMax, Granite
    (re.compile(r"(\.layers\.\d+)\.shared_mlp\."), r"\1.mlp.shared_mlp."),  # Granite
    (re.compile(r"\.shared_mlp\.input_linear\."), ".shared_mlp.gate_up_proj."),
    (re.compile(r"\.shared_mlp\.output_linear\."), ".shared_mlp.down_proj."),
    (re.compile(r"\.mlp\.input_linear\.weight"), ".mlp.experts.gate_up_proj"),
    (re.compile(r"\.mlp\.output_linear\.weight"), ".mlp.experts.down_proj"),
    (re.compile(r"\.mlp\.router(?:\.layer|\.gate)?\."), ".mlp.gate."),  # gpt-oss, Granite, Hunyuan 3
    (re.compile(r"\.mlp\.gate\.wg\."), ".mlp.gate."),  # Hunyuan
    (
        re.compile(r"\.mlp\.(?:moe_statics\.|gate\.|experts\.)?(?:e_score_correction_bias|expert_bias)"),
        ".mlp.gate.e_score_correction_bias",
    ),
)
# Gemma 4 has experts in addition to an MLP, under names without "mlp".
_IN_ADDITION = (
    # A checkpoint that a build wrote has the common names already.
    (re.compile(r"(\.layers\.\d+)\.mlp\.(?!shared_expert\.|experts\.|gate\.)"), r"\1.mlp.shared_expert."),
    (re.compile(r"(\.layers\.\d+)\.experts\."), r"\1.mlp.experts."),
    (re.compile(r"(\.layers\.\d+)\.router\.(?:proj\.)?"), r"\1.mlp.gate."),
)
_ATTENTION = re.compile(r"^model\.layers\.(\d+)\.self_attn\.")
_KIMI = {"forget_gate.": "", "o_proj.": "out_proj.", "o_norm.": "norm.", "": ""}
_BLOCK = re.compile(r"^model\.layers\.(\d+)\.(norm|mixer)\.")
_DENSE_GRANITE = (  # Granite 4 without experts: the shared MLP is the only one
    (re.compile(r"(\.layers\.\d+)\.shared_mlp\.input_linear\."), r"\1.mlp.gate_up_proj."),
    (re.compile(r"(\.layers\.\d+)\.shared_mlp\.output_linear\."), r"\1.mlp.down_proj."),
)
_MIXTRAL = re.compile(r"(\.experts\.\d+\.)(w[123])\.")
_TORCHAO = re.compile(r"\._weight_(qdata|scale|zero_point)$")  # parts of its tensor classes
_OF_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def with_graph_names(checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
    """Return ``checkpoint`` with the graph's tensor names; of a vision-language model only the text part.

    MTP layers are left out, because a draft reads them (export/read/mtp.py), keys and values that no layer uses, and
    the index of DeepSeek-V3.2. No data is read or copied: a part of a tensor is a range of the same file. Raises
    BadCheckpoint for a fused tensor whose number of rows differs from the sum of its parts, and for a tensor that does
    not hold every expert.
    """
    tensors: dict[str, StoredTensor] = {}
    stored_names = dict(checkpoint.stored_names)
    images = vision_language(checkpoint.config)
    config = checkpoint.config if images is None else text_config(checkpoint.config, images)[0]
    further = ("mtp.",) if spec.recurrent is not None else mtp_prefixes(config, spec.layers)
    further += ("model.mtp.",)  # MiMo V2, whose config does not count them
    transposed, by_columns = stores_transposed_experts(checkpoint, spec), BY_NAME[spec.family].transposed
    unread = tuple(
        f"model.layers.{layer}.self_attn.{part}"
        for layer in range(spec.layers - spec.variants.sharing, spec.layers)
        for part in ("k_", "v_")
    )
    for name, tensor in checkpoint.tensors.items():
        text_name = name if images is None else text_tensor(name)
        if text_name is not None and not text_name.startswith((*further, *unread)) and not of_index(text_name):
            split = parts_of(_common(text_name, spec), tensor, spec, transposed=transposed, by_columns=by_columns)
            parts = dict(split)
            tensors |= parts
            stored = name.rpartition(".")[0]
            modules = {each.rpartition(".")[0] for each in parts} - {stored}
            stored_names |= dict.fromkeys(modules, stored_names.get(stored, stored))
    return replace(checkpoint, tensors=tensors, stored_names=stored_names)


def _common(name: str, spec: ModelSpec) -> str:
    """Rename a tensor of a family, of experts, of shared experts or of a router to the common name."""
    family = BY_NAME[spec.family]
    own = family.tensor_names if spec.experts else (*family.tensor_names, *_DENSE_GRANITE)
    if spec.experts is not None and spec.experts.norms is not None:
        own = (*own, *_IN_ADDITION)
    for pattern, common in (*own, *_COMMON):
        name = pattern.sub(common, name)
    if family.one_part_per_block and (block := _BLOCK.match(name)) is not None:
        name = f"{_of_block(int(block[1]), block[2], spec)}.{name[block.end() :]}"
    attention = _ATTENTION.match(name) if isinstance(spec.recurrent, KimiDelta) else None
    if attention is not None and spec.recurrent_of(int(attention[1])) is not None:
        for part, graph_name in _KIMI.items():
            name = name.replace(f".self_attn.{part}", f".linear_attn.{graph_name}")
    name = _TORCHAO.sub(lambda match: ".weight" if match[1] == "qdata" else f".weight_{match[1]}", name)
    return _MIXTRAL.sub(lambda match: f"{match[1]}{_OF_MIXTRAL[match[2]]}.", name)


def _of_block(block: int, part: str, spec: ModelSpec) -> str:
    """Return the module of a ``part``, norm or mixer, of a block that is a mixer, or the MLP after it."""
    begin = 0
    for layer in range(spec.layers):
        name, mlp = f"model.layers.{layer}", spec.has_mlp(layer)
        if block == begin:
            mixer = "mamba" if spec.recurrent_of(layer) else "self_attn"
            return f"{name}.input_layernorm" if part == "norm" else f"{name}.{mixer}"
        if mlp and block == begin + 1:
            return f"{name}.post_attention_layernorm" if part == "norm" else f"{name}.mlp"
        begin += 2 if mlp else 1
    return f"model.layers.block {block}.{part}"  # there is no such block, which is an unknown tensor
