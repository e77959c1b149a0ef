"""The part of a model that one rank of a tensor-parallel target holds: its spec and its tensors.

Queries, keys, values, gate, up and the inputs of recurrent layers are split by outputs, which are rows of the stored
matrices: a rank reads a range of the checkpoint's file. Where its rows are several ranges, the build writes them as one
tensor. The last matmuls of attention, recurrent layers and MLP are split by inputs, which are columns: the build writes
these, too, one file per rank (export/quantize/columns.py). Each expert is split like an MLP. Scales and zero points of
quantized weights are split like the weights; a scale per output of a matrix that is split by inputs is whole on every
rank. Latent vectors, embeddings, norms and biases that are added after a sum over ranks are whole, too. The head is
split by a graph pass (export/passes/over_ranks.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from tandemrt.engines.validation.errors import BadRecipe, quoted
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.layer import UNIFORM, Experts
from tandemrt.export.read.recurrent_shards import Section, obstacle, part_of, sections_of
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators.constants import WIDTH_MULTIPLE
from tandemrt.plugins.operators.int4_layout import CHUNK

_STEP = 8
_PACKED = r"\.(?:int4|int8|float4|float8)\.\w+"  # what a build writes for a weight in 4 or 8 bits
_EXPERT = r"(?:experts\.\d+\.|shared_\w+\.)?"
_BY_INPUTS = re.compile(  # "bytes": the name of a float8 weight in the graph
    rf"model\.layers\.\d+\.(?:self_attn\.o_proj|(?:linear_attn|mamba|conv)\.out_proj|mlp\.{_EXPERT}down_proj)"
    rf"\.weight(?:\.bytes|{_PACKED}(?<!\.factors))?"
)
_TENSOR = re.compile(
    rf"model\.layers\.\d+\.(?P<module>\w+)\.(?P<part>.+?)(?:\.(?:bias|weight(?:_scale(?:_inv)?|{_PACKED})?))?"
)
_MLP = re.compile(rf"{_EXPERT}(?:gate|up)_proj")


@dataclass(frozen=True)
class Shard:
    """Rank ``rank`` of ``ranks``. ``columns``: its tensors that the build wrote, by their names in the graph."""

    rank: int
    ranks: int
    columns: Mapping[str, StoredTensor]

    @staticmethod
    def is_split_by_inputs(name: str) -> bool:
        """Whether the matrix ``name`` is split by inputs, so that the ranks' results must be added."""
        return _BY_INPUTS.fullmatch(name) is not None

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """Return the sizes of this rank's layers. A KV head that several ranks need is on each of them."""
        experts = spec.experts
        if experts is not None:
            shared = experts.shared and replace(experts.shared, intermediate=experts.shared.intermediate // self.ranks)
            experts = replace(experts, intermediate=experts.intermediate // self.ranks, shared=shared)
        return replace(
            spec,
            experts=experts,
            heads=spec.heads // self.ranks,
            kv_heads=max(1, spec.kv_heads // self.ranks),
            intermediate=spec.intermediate // self.ranks,
            recurrent=None if spec.recurrent is None else part_of(spec.recurrent, self.rank, self.ranks),
        )

    def checkpoint(self, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        """Return this rank's tensors of ``checkpoint``, which has the names of the graph, of a model ``spec``."""
        tensors = {name: self._part(name, tensor, spec) for name, tensor in checkpoint.tensors.items()}
        return replace(checkpoint, tensors=tensors)

    def _part(self, name: str, tensor: StoredTensor, spec: ModelSpec) -> StoredTensor:
        if name in self.columns:
            return self.columns[name]
        rows = rows_of(tensor, name, spec, self.rank, self.ranks)
        return tensor if rows is None else part_of_rows(tensor, *rows[0])


def columns_of(tensor: StoredTensor, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first column and the number of columns of a matrix that ``rank`` holds."""
    count = tensor.shape[1] // ranks
    return rank * count, count


def rows_of(
    tensor: StoredTensor, name: str, spec: ModelSpec, rank: int, ranks: int
) -> tuple[tuple[int, int], ...] | None:
    """Return the first row and the number of rows of each range of ``tensor`` that ``rank`` holds; None: all rows.

    ``name``: that of the graph. Leading dimensions of 1 do not count as rows.
    """
    sections = _sections(name, _rows(tensor), spec, ranks)
    if sections is None or prod(tensor.shape) == 1:  # one scale for all outputs
        return None
    if sum(rows for rows, _ in sections) != _rows(tensor):  # the graph rejects its shape
        return None
    of_rank, begin = [], 0
    for rows, parts in sections:
        each = rows // parts
        of_rank.append((begin + rank * parts // ranks * each, max(1, parts // ranks) * each))
        begin += rows
    return tuple(of_rank)


def part_of_rows(tensor: StoredTensor, first: int, count: int) -> StoredTensor:
    """Return a range of the rows of ``tensor``, in the same file."""
    rows = _rows(tensor)
    axis, each = tensor.shape.index(rows), tensor.nbytes // rows
    shape = (*tensor.shape[:axis], count, *tensor.shape[axis + 1 :])
    return replace(tensor, shape=shape, offset=tensor.offset + first * each, nbytes=count * each)


def require_splittable(spec: ModelSpec, checkpoint: Checkpoint, ranks: int, *, inputs: int) -> None:
    """Raise BadRecipe, which names the reason, unless the model can be split over ``ranks``.

    ``checkpoint`` has the names of the graph. ``inputs``: a rank's inputs of a matmul must be a multiple of it, and
    where it is more than 1, those of experts whole chunks of 128.
    """
    if why := _obstacle(spec, checkpoint, ranks, inputs):
        raise BadRecipe(
            f"backend.tensor_parallel = {ranks} cannot split target.checkpoint {checkpoint.folder}: {why}; drop "
            "tensor_parallel or choose another checkpoint"
        )


def _obstacle(spec: ModelSpec, checkpoint: Checkpoint, ranks: int, inputs: int) -> str | None:
    if any("gate_up_proj" in name for name in checkpoint.tensors):
        return f"{spec.family} joins gate and up in one tensor, which is not split yet"
    if spec.variants != UNIFORM or spec.sinks:
        return f"{spec.family} has layers of different shapes or attention sinks, which are not split yet"
    if spec.stored_by_head:
        return f"{spec.family} stores queries, keys and values by head, which is not split yet"
    if spec.qk_norm is not None and spec.qk_norm.by_head:
        return f"{spec.family} norms each head with weights of its own, which are not split yet"
    if spec.normed_head:
        return f"{spec.family} divides the rows of lm_head by their lengths, which are not split yet"
    if spec.experts is not None and (why := _obstacle_of_experts(spec.experts, ranks, inputs)) is not None:
        return why
    if spec.recurrent is not None and (why := obstacle(spec.recurrent, ranks)) is not None:
        return why
    if spec.qk_norm is not None and spec.qk_norm.over_all_heads:
        return f"{spec.family} norms queries and keys over all heads, which are on different ranks"
    if spec.heads % ranks:
        return f"its {spec.heads} attention heads are no multiple of {ranks}"
    if spec.kv_heads % ranks and ranks % spec.kv_heads:
        return f"its {spec.kv_heads} KV heads are neither a multiple nor a divisor of {ranks}"
    if spec.intermediate % ranks:
        return f"the width of its MLP, {spec.intermediate}, is no multiple of {ranks}"
    head = spec.head_dim if spec.latent is None else spec.latent.value
    widths = {"attention's": spec.heads * head, "MLP's": spec.intermediate}
    widths |= {} if spec.recurrent is None else {"recurrent layers'": spec.recurrent.mixed}
    for name, width in widths.items():
        if width % (ranks * inputs):
            return f"the {width} inputs of its {name} last matmul do not give {ranks} ranks multiples of {inputs} each"
    if spec.hidden % _STEP:
        return f"its hidden size, {spec.hidden}, is no multiple of {_STEP}, in which ranks exchange parts on a GPU"
    if transposed := [name for name, tensor in checkpoint.tensors.items() if tensor.transposed]:
        return f"{quoted(transposed[0])} is stored as [inputs, outputs]"
    return None


def _obstacle_of_experts(experts: Experts, ranks: int, inputs: int) -> str | None:
    widths, multiple = [experts.intermediate], WIDTH_MULTIPLE if inputs == 1 else CHUNK
    if experts.shared is not None:
        widths.append(experts.shared.intermediate)
    for width in widths:
        if width % (ranks * multiple):
            rule = f"does not give {ranks} ranks multiples of {multiple} each"
            return f"the width of its experts, {width}, {rule}"
    return None


def _sections(name: str, rows: int, spec: ModelSpec, ranks: int) -> tuple[Section, ...] | None:
    """Return the sections of a tensor with ``rows`` rows that is split by rows; None: it is not."""
    match = _TENSOR.fullmatch(name)
    if match is None or Shard.is_split_by_inputs(name):
        return None
    module, part = match["module"], match["part"]
    if module == "mlp":
        return ((rows, ranks),) if _MLP.fullmatch(part) else None
    if module == "self_attn":
        queries, keys = ("q_proj", "q_b_proj", "kv_b_proj"), ("k_proj", "v_proj")
        return ((rows, spec.heads),) if part in queries else ((rows, spec.kv_heads),) if part in keys else None
    return sections_of(spec.recurrent).get(part) if spec.recurrent and module == spec.recurrent.module else None


def _rows(tensor: StoredTensor) -> int:
    return next((size for size in tensor.shape if size > 1), 1)
