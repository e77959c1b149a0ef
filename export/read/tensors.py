"""Rename the tensors of a checkpoint to the names that the graph uses, and split fused tensors."""

import re
from collections.abc import Iterator
from dataclasses import replace

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.families.registry import BY_NAME
from tandemrt.export.read.layer import Experts
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
        re.compile(r"\.mlp\.(?:moe_statics\.|gate\.)?(?:e_score_correction_bias|expert_bias)"),
        ".mlp.gate.e_score_correction_bias",
    ),
)
# Gemma 4 has experts in addition to an MLP, under names without "mlp".
_IN_ADDITION = (
    (re.compile(r"(\.layers\.\d+)\.mlp\."), r"\1.mlp.shared_expert."),
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
_STACKED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(_bias|_blocks|_scales|)")


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
    transposed = stores_transposed_experts(checkpoint, spec)
    unread = tuple(
        f"model.layers.{layer}.self_attn.{part}"
        for layer in range(spec.layers - spec.variants.sharing, spec.layers)
        for part in ("k_", "v_")
    )
    for name, tensor in checkpoint.tensors.items():
        text_name = name if images is None else text_tensor(name)
        if text_name is not None and not text_name.startswith((*further, *unread)) and not of_index(text_name):
            parts = dict(_parts(_common(text_name, spec), tensor, spec, transposed))
            tensors |= parts
            stored = name.rpartition(".")[0]
            modules = {each.rpartition(".")[0] for each in parts} - {stored}
            stored_names |= dict.fromkeys(modules, stored_names.get(stored, stored))
    return replace(checkpoint, tensors=tensors, stored_names=stored_names)


def stores_transposed_experts(checkpoint: Checkpoint, spec: ModelSpec) -> bool:
    """Whether tensors of all experts are [experts, inputs, outputs]: as published, not as transformers 5 saves them.

    The down matmul decides, because gate and up together may be square.
    """
    if spec.experts is None or spec.experts.gate_up == "separate":
        return False
    saved = (spec.hidden, spec.experts.intermediate)
    down = (tensor for name, tensor in checkpoint.tensors.items() if ".experts." in name and "down_proj" in name)
    return saved[0] == saved[1] or not any(tensor.shape[-2:] == saved for tensor in down)


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


def _parts(name: str, tensor: StoredTensor, spec: ModelSpec, transposed: bool) -> Iterator[tuple[str, StoredTensor]]:
    stem, _, kind = name.rpartition(".")
    module, _, last = stem.rpartition(".")
    if spec.experts is not None and (stacked := _STACKED.fullmatch(name)):
        for part_name, part in _each_expert(stacked, tensor, spec.experts.count, transposed):
            yield from _gate_and_up(part_name, part, spec.experts)
        return
    if spec.experts is not None and spec.experts.gate_up != "separate" and ".mlp.experts." in name:
        # a tensor of one expert, which a build wrote
        yield name, replace(tensor, name=name, transposed=transposed and kind == "weight")
        return
    rows = _fused(spec, module).get(last)
    if rows is None:
        yield name, replace(tensor, name=name)
        return
    if kind == "weight_shape":  # of the whole tensor; its parts have the rows of the config
        return
    stored, total = next(iter(tensor.shape), 0), sum(rows.values())
    is_packed = kind == "weight_zero_point"
    packed = max(1, total // max(1, stored)) if is_packed else 1  # outputs in a row
    if stored * packed != total or any(count % packed for count in rows.values()):
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should have {total} rows by config.json"
            f"{', or fewer that pack them,' if is_packed else ','} its shape is {quoted(list(tensor.shape))}"
        )
    begin, width = tensor.offset, tensor.nbytes // stored
    for projection, count in rows.items():
        shape, nbytes = (count // packed, *tensor.shape[1:]), count // packed * width
        new = f"{module}.{projection}.{kind}"
        yield new, replace(tensor, name=new, shape=shape, offset=begin, nbytes=nbytes)
        begin += nbytes


def _each_expert(
    name: re.Match[str], tensor: StoredTensor, count: int, transposed: bool
) -> Iterator[tuple[str, StoredTensor]]:
    """Split a tensor of all experts. MXFP4 blocks are [outputs, inputs] in any checkpoint."""
    if len(tensor.shape) < 2 or tensor.shape[0] != count:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should hold {count} experts by config.json, its shape is "
            f"{quoted(list(tensor.shape))}"
        )
    kind, nbytes = name[3].removeprefix("_") or "weight", tensor.nbytes // count
    for expert in range(count):
        new, begin = f"{name[1]}.{expert}.{name[2]}.{kind}", tensor.offset + expert * nbytes
        part = replace(tensor, name=new, shape=tensor.shape[1:], offset=begin, nbytes=nbytes)
        yield new, replace(part, transposed=transposed and kind == "weight")


def _gate_and_up(name: str, tensor: StoredTensor, experts: Experts) -> Iterator[tuple[str, StoredTensor]]:
    """Split gate and up of one expert if the graph has separate matmuls for them."""
    stem, _, kind = name.rpartition(".")
    if experts.gate_up != "separate" or not stem.endswith(".gate_up_proj"):
        yield name, tensor
        return
    if tensor.transposed or tensor.shape[0] != 2 * experts.intermediate:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(name)} should have {2 * experts.intermediate} rows, gate and up, by "
            f"config.json, its shape is {quoted(list(tensor.shape))}"
        )
    nbytes = tensor.nbytes // 2
    for at, part in enumerate(("gate_proj", "up_proj")):
        new = f"{stem.removesuffix('gate_up_proj')}{part}.{kind}"
        shape = (experts.intermediate, *tensor.shape[1:])
        yield new, replace(tensor, name=new, shape=shape, offset=tensor.offset + at * nbytes, nbytes=nbytes)


def _fused(spec: ModelSpec, module: str) -> dict[str, dict[str, int]]:
    """Return the fused matmuls of some families in ``module``, with the rows of each part."""
    shared = None if spec.experts is None else spec.experts.shared
    width = spec.intermediate if shared is None or not module.endswith(f".{shared.name}") else shared.intermediate
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "qkv_proj": {"q_proj": query, "k_proj": key, "v_proj": key},
        "gate_up_proj": {"gate_proj": width, "up_proj": width},
    }
