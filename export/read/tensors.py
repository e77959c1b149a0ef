"""The tensors of a checkpoint by the names that the graph asks for, whatever a family calls them or stores as one."""

import re
from collections.abc import Iterator
from dataclasses import replace

from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.mtp import predicts_further
from tandemrt.export.read.spec import ModelSpec, sees_images

# The text part of a model that also sees images, as the first files named it and as transformers names it now.
_TEXT = re.compile(r"(?:language_model\.(?=model\.|lm_head\.)|(?<=^model\.)language_model\.)")
_MIXTRAL = re.compile(r"(\.experts\.\d+\.)(w[123])\.")
_OF_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_STACKED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales|)")
_IMAGES = re.compile(r"(?:model\.)?(?:vision_tower|vision_model|multi_modal_projector)\.")


def named(checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
    """``checkpoint`` with every tensor by the name that the graph asks for; of a model with images, the text part.

    Layers that predict tokens further on are a draft's (export/read/mtp.py).

    Nothing is read or copied: a part of a tensor is a place in the same file. Raises BadCheckpoint for a fused tensor
    that has another number of rows than its parts, and for one that does not hold every expert.
    """
    tensors: dict[str, StoredTensor] = {}
    images = sees_images(checkpoint.config)
    further = predicts_further(checkpoint.config, spec.layers)
    for name, tensor in checkpoint.tensors.items():
        if name.startswith(further) or (images and _IMAGES.match(name)):
            continue
        tensors |= _parts(_expert(_TEXT.sub("", name, count=1) if images else name), tensor, spec)
    return replace(checkpoint, tensors=tensors)


def _expert(name: str) -> str:
    """A tensor of Mixtral's experts and router, or gpt-oss's router, by the name that other families give it."""
    name = name.replace(".block_sparse_moe.", ".mlp.").replace(".mlp.router.", ".mlp.gate.")
    return _MIXTRAL.sub(lambda found: f"{found[1]}{_OF_MIXTRAL[found[2]]}.", name)


def _parts(name: str, tensor: StoredTensor, spec: ModelSpec) -> Iterator[tuple[str, StoredTensor]]:
    stem, _, kind = name.rpartition(".")
    module, _, last = stem.rpartition(".")
    if spec.experts is not None and spec.experts.joined and ".mlp.experts." in name:
        if stacked := _STACKED.fullmatch(name):
            yield from _each_expert(stacked, tensor, spec.experts.count)
        else:  # of one expert, as a build wrote it
            yield name, replace(tensor, name=name, transposed=kind == "weight")
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


def _each_expert(name: re.Match[str], tensor: StoredTensor, count: int) -> Iterator[tuple[str, StoredTensor]]:
    """A tensor of all experts as one of each: gpt-oss has weights of [inputs, outputs], and blocks the other way."""
    if len(tensor.shape) < 2 or tensor.shape[0] != count:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should hold {count} experts by config.json, its shape is "
            f"{quoted(list(tensor.shape))}"
        )
    kind, nbytes = name[3].removeprefix("_") or "weight", tensor.nbytes // count
    for expert in range(count):
        new, begin = f"{name[1]}.{expert}.{name[2]}.{kind}", tensor.offset + expert * nbytes
        yield (
            new,
            replace(tensor, name=new, shape=tensor.shape[1:], offset=begin, nbytes=nbytes, transposed=kind == "weight"),
        )


def _fused(spec: ModelSpec) -> dict[str, dict[str, int]]:
    """Products that some families store as one, and the rows of each part."""
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "qkv_proj": {"q_proj": query, "k_proj": key, "v_proj": key},
        "gate_up_proj": {"gate_proj": spec.intermediate, "up_proj": spec.intermediate},
    }
