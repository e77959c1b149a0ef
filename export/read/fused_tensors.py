"""Split the fused tensors of a checkpoint: all experts, gate and up, or query, key and value in one tensor."""

import re
from collections.abc import Iterator
from dataclasses import replace

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.layer import Experts
from tandemrt.export.read.spec import ModelSpec

_STACKED = re.compile(
    r"(.+\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(_bias|_blocks|_scales|\.weight|\.bias|)"
)


def parts_of(
    name: str, tensor: StoredTensor, spec: ModelSpec, *, transposed: bool, by_columns: bool = False
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of the graph that ``tensor``, whose common name is ``name``, holds, with their names.

    ``transposed``: what ``stores_transposed_experts`` says. No data is read or copied: a part is a range of the same
    file, or of its columns. ``by_columns``: all matrices of layers are stored as [inputs, outputs] (GPT-2). Raises
    BadCheckpoint for a fused tensor whose number of rows differs from the sum of its parts, and for a tensor that does
    not hold every expert.
    """
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
    if by_columns and kind == "weight" and len(tensor.shape) == 2 and ".layers." in module:
        yield from _by_columns(name, tensor, module, rows)
        return
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


def _by_columns(
    name: str, tensor: StoredTensor, module: str, parts: dict[str, int] | None
) -> Iterator[tuple[str, StoredTensor]]:
    """Split a matrix [inputs, outputs] of ``module``; None: it has one part."""
    if parts is None:
        yield name, replace(tensor, name=name, transposed=True)
        return
    inputs, total = tensor.shape
    if sum(parts.values()) != total:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should have {sum(parts.values())} columns by config.json, "
            f"its shape is {quoted(list(tensor.shape))}"
        )
    first = 0
    for projection, count in parts.items():
        new = f"{module}.{projection}.weight"
        yield new, replace(tensor, name=new, shape=(inputs, count), transposed=True, columns=(first, total))
        first += count


def stores_transposed_experts(checkpoint: Checkpoint, spec: ModelSpec) -> bool:
    """Whether tensors of all experts are [experts, inputs, outputs]: as published, not as transformers 5 saves them.

    The down matmul decides, because gate and up together may be square.
    """
    if spec.experts is None or spec.experts.gate_up == "separate":
        return False
    saved = (spec.hidden, spec.experts.intermediate)
    down = (tensor for name, tensor in checkpoint.tensors.items() if ".experts." in name and "down_proj" in name)
    return saved[0] == saved[1] or not any(tensor.shape[-2:] == saved for tensor in down)


def _each_expert(
    name: re.Match[str], tensor: StoredTensor, count: int, transposed: bool
) -> Iterator[tuple[str, StoredTensor]]:
    """Split a tensor of all experts. MXFP4 blocks are [outputs, inputs] in any checkpoint."""
    if len(tensor.shape) < 2 or tensor.shape[0] != count:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should hold {count} experts by config.json, its shape is "
            f"{quoted(list(tensor.shape))}"
        )
    kind, nbytes = name[3].strip("_.") or "weight", tensor.nbytes // count
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
    of_head = {"q": query // spec.kv_heads, "k": spec.head_dim, "v": spec.head_dim}
    by_head = {
        f"heads.{head}.{kind}_proj": of_head[kind] for head in range(spec.kv_heads) for kind in spec.stored_by_head
    }
    return {
        "qkv_proj": {"q_proj": query, "k_proj": key, "v_proj": key},
        "gate_up_proj": {"gate_proj": width, "up_proj": width},
        "".join((*spec.stored_by_head, "_proj")): by_head,
    }
