"""The part of a model that one rank of a tensor-parallel target holds: its spec and its tensors.

Queries, keys, values, gate and up are split by outputs, which are rows of the stored matrices: a rank reads a range of
the checkpoint's file. The last matmuls of attention and MLP are split by inputs, which are columns: the build writes
them anew, one file per rank (export/quantize/columns.py). Each expert is split like an MLP. Scales and zero points of
quantized weights are split like the weights; a scale per output of a matrix that is split by inputs is whole on every
rank. Embeddings, norms and biases that are added after a sum over ranks are whole, too. The head is split by a graph
pass (export/passes/over_ranks.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from tandemrt.engines.validation.errors import BadRecipe, quoted
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators.constants import WIDTH_MULTIPLE

_STEP = 8
_PACKED = r"\.int4\.\w+"  # what a build writes for a weight in 4 bits
_EXPERT = r"(?:experts\.\d+\.|shared_\w+\.)?"
_BY_INPUTS = re.compile(  # "bytes": the name of a float8 weight in the graph
    rf"model\.layers\.\d+\.(?:self_attn\.o_proj|mlp\.{_EXPERT}down_proj)\.weight(?:\.bytes|{_PACKED})?"
)
_BY_OUTPUTS = re.compile(
    rf"model\.layers\.\d+\.(?:self_attn\.([qkv])_proj|mlp\.{_EXPERT}(?:gate|up)_proj)\."
    rf"(?:bias|weight(?:_scale(?:_inv)?|{_PACKED})?)"
)


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
        )

    def checkpoint(self, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        """Return this rank's tensors of ``checkpoint``, which has the names of the graph, of a model ``spec``."""
        tensors = {name: self._part(name, tensor, spec) for name, tensor in checkpoint.tensors.items()}
        return replace(checkpoint, tensors=tensors)

    def _part(self, name: str, tensor: StoredTensor, spec: ModelSpec) -> StoredTensor:
        if self.is_split_by_inputs(name):
            return self.columns[name]
        if (found := _BY_OUTPUTS.fullmatch(name)) is None or prod(tensor.shape) == 1:  # one scale for all outputs
            return tensor
        if found[1] in ("k", "v"):
            heads = self.spec(spec).kv_heads
            first = self.rank * spec.kv_heads // self.ranks
            return _rows(tensor, first * spec.head_dim, heads * spec.head_dim)
        count = tensor.shape[0] // self.ranks
        return _rows(tensor, self.rank * count, count)


def columns_of(tensor: StoredTensor, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first column and the number of columns of a matrix that ``rank`` holds."""
    count = tensor.shape[1] // ranks
    return rank * count, count


def require_splittable(spec: ModelSpec, checkpoint: Checkpoint, ranks: int, *, inputs: int = 1) -> None:
    """Raise BadRecipe, which names the reason, unless the model can be split over ``ranks``.

    ``checkpoint`` has the names of the graph. ``inputs``: a rank's inputs of a matmul must be a multiple of it.
    """
    if why := _obstacle(spec, checkpoint, ranks, inputs):
        raise BadRecipe(
            f"backend.tensor_parallel = {ranks} cannot split target.checkpoint {checkpoint.folder}: {why}; drop "
            "tensor_parallel or choose another checkpoint"
        )


def _obstacle(spec: ModelSpec, checkpoint: Checkpoint, ranks: int, inputs: int) -> str | None:
    if any("gate_up_proj" in name for name in checkpoint.tensors):
        return f"{spec.family} joins gate and up in one tensor, which is not split yet"
    if spec.experts is not None and inputs > 1:
        return f"{spec.family} has experts and quantized weights, which are not split yet"
    if spec.experts is not None:
        shared = spec.experts.shared
        for width in (spec.experts.intermediate, WIDTH_MULTIPLE * ranks if shared is None else shared.intermediate):
            if width % (ranks * WIDTH_MULTIPLE):
                rule = f"does not give {ranks} ranks multiples of {WIDTH_MULTIPLE} each"
                return f"the width of its experts, {width}, {rule}"
    if spec.recurrent is not None:
        return f"{spec.family} has recurrent layers, which are not split yet"
    if spec.latent is not None:
        return f"{spec.family} caches one latent vector for all heads, which is not split yet"
    if spec.gated_attention:
        return f"{spec.family} has gated attention, which is not split yet"
    if spec.qk_norm is not None and spec.qk_norm.over_all_heads:
        return f"{spec.family} norms queries and keys over all heads, which are on different ranks"
    if spec.heads % ranks:
        return f"its {spec.heads} attention heads are no multiple of {ranks}"
    if spec.kv_heads % ranks and ranks % spec.kv_heads:
        return f"its {spec.kv_heads} KV heads are neither a multiple nor a divisor of {ranks}"
    if spec.intermediate % ranks:
        return f"the width of its MLP, {spec.intermediate}, is no multiple of {ranks}"
    for name, width in (("attention's", spec.heads * spec.head_dim), ("MLP's", spec.intermediate)):
        if width % (ranks * inputs):
            return f"the {width} inputs of its {name} last matmul do not give {ranks} ranks multiples of {inputs} each"
    if spec.hidden % _STEP:
        return f"its hidden size, {spec.hidden}, is no multiple of {_STEP}, in which ranks exchange parts on a GPU"
    if transposed := [name for name, tensor in checkpoint.tensors.items() if tensor.transposed]:
        return f"{quoted(transposed[0])} is stored as [inputs, outputs]"
    return None


def _rows(tensor: StoredTensor, first: int, count: int) -> StoredTensor:
    each = tensor.nbytes // tensor.shape[0]
    shape = (count, *tensor.shape[1:])
    return replace(tensor, shape=shape, offset=tensor.offset + first * each, nbytes=count * each)
