"""Adjusted logits on a CUDA device: kernel and graph give the numbers of the definition, in place and in rounds."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from tandemrt import LLM
from tandemrt.engines.contract import contract
from tandemrt.export.model.weightless import build_adjust
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.operators.launch import Context
from tandemrt.runtime.check.adjust_logits import edge_case_adjust_batch, reference_adjust, run_adjust
from tandemrt.runtime.device.backends.onnxruntime.engine import OnnxRuntimeEngine
from tandemrt.runtime.device.backends.onnxruntime.kernels import KernelEngine
from tests.gpu.here import compute_capabilities
from tests.gpu.rounds import EVEN, MIXED, drive, output_of, paged, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DTYPES = ["float32", "float16", "bfloat16"]
SHAPES = [(33, 0, 16), (1001, 4, 64), (2049, 1, 300), (151936, 4, 4096)]  # vocab, window, columns
CUDA = torch.device("cuda", 0)
PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "logit_bias": dict.fromkeys(range(65, 75), 4.0)},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.4},
    {"logit_bias": {70: 100.0}},
    {},
]
ADJUSTED = [(prompt, params | PENALTIES[i % 4]) for i, (prompt, params) in enumerate([*MIXED, *EVEN])]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder: Path = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, names=["adjust"])
    return Context(CUDA, folder)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "window", "columns"), SHAPES)
def test_the_kernel_gives_the_numbers_of_the_definition(
    context: Context, vocab: int, window: int, columns: int, dtype: str
) -> None:
    engine = KernelEngine("adjust_logits", contract.adjust(vocab=vocab, dtype=dtype), context)
    for seed in range(3):
        case = edge_case_adjust_batch(vocab=vocab, window=window, columns=columns, batch=5, seed=seed)
        np.testing.assert_array_equal(run_adjust(engine, case), reference_adjust(case, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "window", "columns"), SHAPES[:3])
def test_the_graph_gives_the_numbers_of_the_definition(
    tmp_path: Path, vocab: int, window: int, columns: int, dtype: str
) -> None:
    ir.save(build_adjust(vocab=vocab, dtype=dtype), tmp_path / "adjust.onnx")
    bindings = contract.adjust(vocab=vocab, dtype=dtype)
    engine = OnnxRuntimeEngine.open(tmp_path / "adjust.onnx", bindings, device="cuda")
    case = edge_case_adjust_batch(vocab=vocab, window=window, columns=columns, batch=5, seed=0)
    np.testing.assert_array_equal(run_adjust(engine, case), reference_adjust(case, dtype))


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp(request.param) / "tiny", backend=paged(), dtype=request.param)


def test_rounds_with_penalties_are_graphs_that_write_what_eager_runs_write(bundle: Path) -> None:
    outputs = []
    for cuda_graphs in (True, False):
        with LLM(bundle, cuda_graphs=cuda_graphs) as llm:
            first = output_of(drive(llm, ADJUSTED))
            assert output_of(drive(llm, ADJUSTED)) == first, "a second run repeats the first"
            if cuda_graphs:
                assert set(llm.metrics.eager_runs) == {"prompts"}
                assert any(key[0] == "adjust" for key in llm.loop.target._graphs._graphs)  # type: ignore[index]
            outputs.append(first)
    assert outputs[0] == outputs[1]
    assert set(outputs[0][2][0]) == {70}


def test_overlap_changes_no_penalized_token(bundle: Path) -> None:
    even = ADJUSTED[len(MIXED) :]
    outputs = []
    for overlap in (True, False):
        with LLM(bundle, overlap=overlap) as llm:
            outputs.append(output_of(drive(llm, even)))
    assert outputs[0] == outputs[1]
