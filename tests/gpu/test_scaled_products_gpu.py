"""Checkpoints in float8 on a CUDA device: logits, texts with speculation on and off, and GPUs that are refused."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tandemrt.engines.errors import BackendUnavailable
from tandemrt.engines.operators import SCHEMAS
from tandemrt.engines.recipe import Recipe
from tandemrt.export.build import build
from tandemrt.plugins.faces import launcher
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.launch import Context
from tests.engine import narrow
from tests.engine.decoding import Decoder, expected_logits, open_steps
from tests.engine.test_quantized_checkpoints import FLOAT8
from tests.engine.test_scaled_products import SCALES
from tests.gpu.here import compute_capabilities, needs_float8
from tests.gpu.rounds import by_graphs_and_eagerly, paged, where_windows_part
from tests.makers import tiny_checkpoint, write_recipe

pytestmark = needs_float8
CAPACITY = 170


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, names=["attention", "swiglu", "float8"], head_dims=[64])
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SCALES)
def test_logits_are_those_that_the_checkpoint_means(tmp_path: Path, kernels: Path, case: str, dtype: str) -> None:
    """Chunks of many rows, windows of few."""
    open_engine = partial(open_steps, folder=tmp_path, device=torch.device("cuda", 0), kernels=kernels)
    model = FLOAT8[case].write(tmp_path)
    texts = [torch.randint(0, 61, (120,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(2)]
    expected = [expected_logits(model, text) for text in texts]
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        decode = Decoder(tmp_path, "paged", 2, dtype, CAPACITY, device="cuda", open_engine=open_engine)
        start = 0
        for query in (50, 3, 1, 6, 20):
            found = decode([text[start : start + query] for text in texts], [start, start])
            wanted = torch.stack([logits[start : start + query] for logits in expected])
            # A sum that is rounded in another way makes a number of float8 another one, a sixteenth away.
            assert (found - wanted).norm() < 0.06 * wanted.norm()
            start += query


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and draft in float8, their heads too."""
    folder, case = tmp_path_factory.mktemp("bundle"), FLOAT8[SCALES[0]]
    sources = [tiny_checkpoint(folder / name, layers=n, seed=1, head_dim=32) for name, n in (("t", 2), ("d", 1))]
    for source in sources:
        narrow.rewrite(source, {**case.config, "ignore": []}, case.store, head=True)
    write_recipe(folder / "r.toml", target=sources[0], draft=sources[1], backend=paged(), dtype="bfloat16")
    return build(Recipe.load(folder / "r.toml"), folder / "bundle").folder


def test_cuda_graphs_change_no_token(bundle: Path) -> None:
    by_graphs, eagerly = by_graphs_and_eagerly(bundle)
    assert by_graphs == eagerly


def test_windows_are_compared_with_plain_decoding(bundle: Path) -> None:
    """They may round differently, and then the texts of noise part: reported, and not at once."""
    assert all(at is None or at > 0 for at in where_windows_part(bundle))


def test_what_a_row_gives_depends_on_no_other(kernels: Path) -> None:
    """Up to 16 rows by kernels of ours, so a window there gives what its tokens give alone, bit for bit."""
    context, (width, inner) = Context(torch.device("cuda", 0), kernels), (1040, 4112)
    weight, rows = (_float8(torch.randn(n, inner, device="cuda")) for n in (width, 16))
    alone = []
    for count in range(1, 17):
        product = torch.empty(count, width, dtype=torch.bfloat16, device="cuda")
        tensors = {"quantized": rows[:count], "weight": weight.view(torch.uint8), "product": product}
        launcher("float8_product", context)(tensors, {}, context).run()
        alone.append(product)
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
        product = torch.empty(rows, width, dtype=dtype, device="cuda")
        tensors = {"quantized": x, "weight": weight.view(torch.uint8), "product": product}
        call = launcher("float8_product", context)(tensors, {}, context)
        expected = torch._scaled_mm(x, weight.t(), one, one, out_dtype=dtype)
        call.run()
        assert torch.equal(product, expected)
        product.fill_(torch.nan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call.run()
        graph.replay()
        assert torch.equal(product, expected)


@pytest.mark.parametrize("operator", ["scaled_product", "quantized_swiglu", "quantized_norm", "quantize_tokens"])
def test_a_call_takes_any_number_of_tokens(kernels: Path, operator: str) -> None:
    """A grid has 65,535 blocks at most along all axes but the first."""
    context, count, width = Context(torch.device("cuda", 0), kernels), 70_000, 16

    def tokens(size: int) -> torch.Tensor:
        return torch.randn(1, size, dtype=torch.bfloat16, device="cuda").repeat(count, 1)

    scales, each = torch.rand(1, 1, device="cuda").repeat(count, 1), torch.rand(2 * width, device="cuda")
    made = torch.empty(count, width, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    rounded = {"quantized": made, "scales": torch.empty_like(scales)}
    tensors = {
        "scaled_product": {
            "quantized": _float8(tokens(width)),
            "scales": scales,
            "weight": _float8(torch.randn(width, width, device="cuda")).view(torch.uint8),
            "weight_scales": each[:width],
            "product": tokens(width),
        },
        "quantized_swiglu": {"gate_up": tokens(2 * width), "product_scales": scales, "weight_scales": each, **rounded},
        "quantized_norm": {
            "skip": tokens(width),
            "product": tokens(width),
            "product_scales": scales,
            "weight_scales": each[:width],
            "norm_weight": tokens(width)[0],
            "sum": tokens(width),
            **rounded,
        },
        "quantize_tokens": {"x": tokens(width), **rounded},
    }[operator]
    attributes = {"epsilon": 1e-5} if operator == "quantized_norm" else {}
    launcher(operator, context)(tensors, attributes, context).run()
    found = tensors["product" if operator == "scaled_product" else "quantized"].float()
    assert found[0].abs().sum() > 0
    assert torch.equal(found, found[:1].expand_as(found))


def _float8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


def test_a_gpu_without_float8_is_refused(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(torch.device("cuda", 0), kernels)
    launcher("scaled_product", context)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 6))
    with pytest.raises(BackendUnavailable, match=r"scaled_product needs compute capability 8\.9 or later, .* has 8\.6"):
        launcher("scaled_product", context)


@pytest.mark.parametrize("operator", ["scaled_product", "float8_window_attention"])
def test_kernels_compiled_for_older_gpus_are_refused(tmp_path: Path, operator: str) -> None:
    """Their code is empty there: a later GPU would run it and leave its outputs as they were."""
    name = SCHEMAS[operator].kernels
    compile_kernels(["8.0"], tmp_path, names=[name], dtypes=["bfloat16"], head_dims=[64])
    with pytest.raises(BackendUnavailable, match=rf"{operator} needs kernels compiled for .* 8\.9 or later, .* sm_80"):
        launcher(operator, Context(torch.device("cuda", 0), tmp_path))
