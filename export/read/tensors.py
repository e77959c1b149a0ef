"""Rename the tensors of a checkpoint to the names that the graph uses, and split fused tensors."""

import re
from collections.abc import Iterator
from dataclasses import replace

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.mtp import mtp_prefixes
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.vision_language import text_tensor, vision_language

_MIXTRAL = re.compile(r"(\.experts\.\d+\.)(w[123])\.")
_OF_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_STACKED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales|)")


def with_graph_names(checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
    """Return ``checkpoint`` with the graph's tensor names; of a vision-language model only the text part.

    MTP layers are left out, because a draft reads them (export/read/mtp.py). No data is read or copied: a part of a
    tensor is a range of the same file. Raises BadCheckpoint for a fused tensor whose number of rows differs from the
    sum of its parts, and for a tensor that does not hold every expert.
    """
    tensors: dict[str, StoredTensor] = {}
    images = vision_language(checkpoint.config) is not None
    further = mtp_prefixes(checkpoint.config, spec.layers)
    transposed = stores_transposed_experts(checkpoint, spec)
    for name, tensor in checkpoint.tensors.items():
        text_name = text_tensor(name) if images else name
        if text_name is not None and not name.startswith(further):
            tensors |= _parts(_expert(text_name), tensor, spec, transposed)
    return replace(checkpoint, tensors=tensors)


def stores_transposed_experts(checkpoint: Checkpoint, spec: ModelSpec) -> bool:
    """Whether tensors of all experts are [experts, inputs, outputs]: as published, not as transformers 5 saves them.

    The down matmul decides, because gate and up together may be square.
    """
    if spec.experts is None:
        return False
    saved = (spec.hidden, spec.experts.intermediate)
    down = (tensor for name, tensor in checkpoint.tensors.items() if ".experts." in name and "down_proj" in name)
    return saved[0] == saved[1] or not any(tensor.shape[-2:] == saved for tensor in down)


def _expert(name: str) -> str:
    """Rename a tensor of Mixtral's experts and router, or of gpt-oss's router, to the common name."""
    name = name.replace(".block_sparse_moe.", ".mlp.").replace(".mlp.router.", ".mlp.gate.")
    return _MIXTRAL.sub(lambda found: f"{found[1]}{_OF_MIXTRAL[found[2]]}.", name)


def _parts(name: str, tensor: StoredTensor, spec: ModelSpec, transposed: bool) -> Iterator[tuple[str, StoredTensor]]:
    stem, _, kind = name.rpartition(".")
    module, _, last = stem.rpartition(".")
    if spec.experts is not None and spec.experts.gate_up != "separate" and ".mlp.experts." in name:
        if stacked := _STACKED.fullmatch(name):
            yield from _each_expert(stacked, tensor, spec.experts.count, transposed)
        else:  # a tensor of one expert, which a build wrote
            yield name, replace(tensor, name=name, transposed=transposed and kind == "weight")
        return
    rows = _fused(spec).get(last)
    if rows is None:
        yield name, replace(tensor, name=name)
        return
    if not tensor.shape or tensor.shape[0] != sum(rows.values()):
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should have {sum(rows.values())} rows by config.json, its "
            f"shape is {quoted(list(tensor.shape))}"
        )
    begin, width = tensor.offset, tensor.nbytes // tensor.shape[0]
    for part, count in rows.items():
        shape, nbytes = (count, *tensor.shape[1:]), count * width
        new = f"{module}.{part}.{kind}"
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


def _fused(spec: ModelSpec) -> dict[str, dict[str, int]]:
    """Return the fused matmuls of some families, with the rows of each part."""
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "qkv_proj": {"q_proj": query, "k_proj": key, "v_proj": key},
        "gate_up_proj": {"gate_proj": spec.intermediate, "up_proj": spec.intermediate},
    }
