"""What passes make of published graphs, and formats of weights of matrices: equal to the recorded."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tandemrt.engines.validation.errors import BadRecipe
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.passes.graph_pass import Pipeline
from tandemrt.export.passes.pipelines import BATCH_INVARIANT, PIPELINES
from tandemrt.export.passes.residual_norms import fuse_norms_of_sums
from tandemrt.export.quantize.gguf.packed import _TYPES, _matrix, gguf_form
from tandemrt.export.quantize.groups import QuantizedMatrix, nibbles, quantize
from tandemrt.export.read.quantization.gguf import _SCHEMES
from tandemrt.plugins.onnxruntime.custom_operators import has_kernels
from tests.plain.test_families import PUBLISHED
from tests.plain.test_published_graphs import any_weights, described, digest, graphs
from tests.recorded import require_recorded

# Of each kind: norms of sums, of heads and of outputs, experts, recurrent layers, gates, scales, windows, biases.
NAMES = (
    *("gemma-3-1b-it", "Qwen3-Next-80B-A3B-Instruct", "gpt-oss-20b", "OLMo-2-1124-7B-Instruct"),
    *("granite-3.3-8b-instruct", "starcoder2-3b", "LFM2-1.2B"),
)
FORMS = [
    LowBitFormat(bits, group, zeros=zeros, tiles=tiles)
    for bits, group, zeros, tiles in product((4, 8), (32, 64), (False, True), (None, "float16"))
    if tiles or group == 32
]
INTERLEAVED = [LowBitFormat(bits, 32, zeros=zeros, interleaved=True) for bits, zeros in product((4, 8), (False, True))]


@pytest.mark.skipif(not has_kernels(), reason="graphs differ without a C compiler")
@pytest.mark.parametrize("name", NAMES)
def test_every_pass_rewrites_a_published_graph_as_before(name: str) -> None:
    def answers() -> Iterator[str]:
        others: dict[Lowering, Pipeline] = {"paged": BATCH_INVARIANT, "grouped": Pipeline((fuse_norms_of_sums,))}
        for pipelines in (PIPELINES, {**PIPELINES, **others}):
            for lowering, _, model in graphs(json.loads(PUBLISHED[name][0])):
                try:
                    counts: object = pipelines[lowering](model)
                except BadRecipe as error:
                    counts = error
                yield f"{counts} {digest(lowering, chr(10).join(described(model)))}"

    with any_weights():
        require_recorded(f"passes/{name}", answers())


def shown(matrix: QuantizedMatrix) -> str:
    stored = {name: f"{array.dtype} {array.shape} {array.tobytes().hex()}" for name, array in matrix.stored().items()}
    return f"{matrix.form} {stored} {matrix.dequantized.astype(np.float64).sum():.4g}"


def test_matrices_are_stored_in_every_form_as_before() -> None:
    draw = np.random.default_rng(3)
    matrices = [draw.standard_normal((8, inner), np.float32) for inner in (32, 96, 100)]
    matrices.append(np.zeros((8, 64), np.float32))
    answers = []
    for matrix, form in product(matrices, (*FORMS, *INTERLEAVED)):
        low = quantize(matrix, replace(form, zeros=False), np.float16 if form.tiles else np.float32)
        if form.zeros:
            zeros = draw.integers(0, 16, low.scales.shape).astype(np.uint8)
            answers += [shown(replace(low, form=form, zeros=each)) for each in (zeros, np.zeros_like(zeros))]
        else:
            answers.append(shown(low))
            if form.bits == 4:
                answers.append(shown(low.in_form(replace(form, bits=8))))
    answers += [str(nibbles(np.arange(count, dtype=np.uint8))) for count in range(5)]
    require_recorded("matrices", answers)


@pytest.mark.parametrize("name", _TYPES)
def test_blocks_of_a_gguf_type_are_read_as_before(name: str) -> None:
    stored = _TYPES[name]
    blocks = np.random.default_rng(5).integers(0, 256, (4, 2, stored.nbytes)).astype(np.uint8)
    blocks[..., 1::8] &= 0x3B  # finite scales, wherever they are
    matrix = _matrix(stored, blocks, 2 * stored.inputs)
    fields = {field: getattr(matrix, field) for field in ("integers", "scales", "offsets", "subscales", "suboffsets")}
    answers = [f"{field} {None if array is None else array.tobytes().hex()}" for field, array in fields.items()]
    answers += [str(gguf_form(_SCHEMES[name], on_gpu=each)) for each in (False, True)]
    require_recorded(f"gguf/{name}", answers)
