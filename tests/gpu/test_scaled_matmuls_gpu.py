"""Checkpoints in float8 on a CUDA device: logits, texts with speculation on and off, and GPUs that are refused."""

from pathlib import Path

import pytest
import torch

from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.export.bundle.build import build
from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.operators.launch import Context
from tests.engine import quantized
from tests.engine.test_quantized_checkpoints import FLOAT8
from tests.engine.test_scaled_matmuls import SCALES
from tests.gpu.here import compute_capabilities, needs_float8
from tests.gpu.quantized_logits import check_logits
from tests.gpu.rounds import by_graphs_and_eagerly, paged, where_windows_part
from tests.makers import write_recipe

pytestmark = needs_float8


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, names=["attention", "swiglu", "float8"], head_dims=[64])
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SCALES)
def test_logits_are_those_that_the_checkpoint_means(tmp_path: Path, kernels: Path, case: str, dtype: str) -> None:
    model = FLOAT8[case].write(tmp_path)
    # A sum that is rounded differently can move an input to the next float8 value, a sixteenth away.
    check_logits(tmp_path, model, kernels, dtype, near=0.06)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and draft in float8, their heads too."""
    folder, case = tmp_path_factory.mktemp("bundle"), FLOAT8[SCALES[0]]
    target, draft = quantized.write_pair(folder, {**case.config, "ignore": []}, case.store)
    write_recipe(folder / "r.toml", target=target, draft=draft, backend=paged(), dtype="bfloat16")
    return build(Recipe.load(folder / "r.toml"), folder / "bundle").folder


def test_cuda_graphs_change_no_token(bundle: Path) -> None:
    by_graphs, eagerly = by_graphs_and_eagerly(bundle)
    assert by_graphs == eagerly


def test_draft_windows_are_compared_with_autoregressive_decoding(bundle: Path) -> None:
    """They may round differently, and then the texts of noise part: reported, and not at once."""
    assert all(at is None or at > 0 for at in where_windows_part(bundle))


def test_the_outputs_of_a_row_depend_on_no_other(kernels: Path) -> None:
    """Up to 16 rows by kernels of ours, so a window there gives what its tokens give alone, bit for bit."""
    context, (width, inner) = Context(torch.device("cuda", 0), kernels), (1040, 4112)
    weight, rows = (_float8(torch.randn(n, inner, device="cuda")) for n in (width, 16))
    alone = []
    for count in range(1, 17):
        out = torch.empty(count, width, dtype=torch.bfloat16, device="cuda")
        tensors = {"quantized": rows[:count], "weight": weight.view(torch.uint8), "out": out}
        launcher("float8_matmul", context)(tensors, {}, context).run()
        alone.append(out)
    assert all(torch.equal(each, alone[-1][: len(each)]) for each in alone)


@pytest.mark.parametrize("rows", [17, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_fastest_algorithm_gives_the_bits_of_the_librarys_choice(
    kernels: Path, rows: int, dtype: torch.dtype
) -> None:
    """Eagerly and in a graph, and for two steps whose weights have one shape."""
    context, (width, inner) = Context(torch.device("cuda", 0), kernels), (1040, 4112)
    one = torch.ones(1, device="cuda")
    for _ in range(2):
        weight, x = (_float8(torch.randn(n, inner, device="cuda")) for n in (width, rows))
        out = torch.empty(rows, width, dtype=dtype, device="cuda")
        tensors = {"quantized": x, "weight": weight.view(torch.uint8), "out": out}
        call = launcher("float8_matmul", context)(tensors, {}, context)
        expected = torch._scaled_mm(x, weight.t(), one, one, out_dtype=dtype)
        call.run()
        assert torch.equal(out, expected)
        out.fill_(torch.nan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call.run()
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("operator", ["scaled_matmul", "quantized_swiglu", "quantized_norm", "quantize_tokens"])
def test_a_call_takes_any_number_of_tokens(kernels: Path, operator: str) -> None:
    """A grid has 65,535 blocks at most along all axes but the first."""
    context, count, width = Context(torch.device("cuda", 0), kernels), 70_000, 16

    def tokens(size: int) -> torch.Tensor:
        return torch.randn(1, size, dtype=torch.bfloat16, device="cuda").repeat(count, 1)

    scales, each = torch.rand(1, 1, device="cuda").repeat(count, 1), torch.rand(2 * width, device="cuda")
    quantized = torch.empty(count, width, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    rounded = {"quantized": quantized, "scales": torch.empty_like(scales)}
    tensors = {
        "scaled_matmul": {
            "quantized": _float8(tokens(width)),
            "scales": scales,
            "weight": _float8(torch.randn(width, width, device="cuda")).view(torch.uint8),
            "weight_scales": each[:width],
            "out": tokens(width),
        },
        "quantized_swiglu": {"gate_up": tokens(2 * width), "token_scales": scales, "weight_scales": each, **rounded},
        "quantized_norm": {
            "skip": tokens(width),
            "update": tokens(width),
            "token_scales": scales,
            "weight_scales": each[:width],
            "norm_weight": tokens(width)[0],
            "sum": tokens(width),
            **rounded,
        },
        "quantize_tokens": {"x": tokens(width), **rounded},
    }[operator]
    attributes = {"epsilon": 1e-5} if operator == "quantized_norm" else {}
    launcher(operator, context)(tensors, attributes, context).run()
    outputs = tensors["out" if operator == "scaled_matmul" else "quantized"].float()
    assert outputs[0].abs().sum() > 0
    assert torch.equal(outputs, outputs[:1].expand_as(outputs))


def _float8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


def test_a_gpu_without_float8_is_refused(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(torch.device("cuda", 0), kernels)
    launcher("scaled_matmul", context)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 6))
    with pytest.raises(BackendUnavailable, match=r"scaled_matmul needs compute capability 8\.9 or later, .* has 8\.6"):
        launcher("scaled_matmul", context)


@pytest.mark.parametrize("operator", ["scaled_matmul", "float8_window_attention"])
def test_kernels_compiled_for_older_gpus_are_refused(tmp_path: Path, operator: str) -> None:
    """Their code is empty there: a later GPU would run it and leave its outputs as they were."""
    name = SCHEMAS[operator].kernels
    compile_kernels(["8.0"], tmp_path, names=[name], dtypes=["bfloat16"], head_dims=[64])
    with pytest.raises(BackendUnavailable, match=rf"{operator} needs kernels compiled for .* 8\.9 or later, .* sm_80"):
        launcher(operator, Context(torch.device("cuda", 0), tmp_path))
