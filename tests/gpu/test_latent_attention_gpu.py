"""The kernels of ``latent_attention`` against its definition, and models with latent attention, on a CUDA device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandemrt import LLM
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.kernels.latent_attention import launch
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.reference.latent_attention import latent_attention as reference
from tests.engine.implementation_cases import KINDS, to_numpy, to_torch
from tests.engine.latent_cases import RANK, SCALE, case
from tests.gpu.here import compute_capabilities
from tests.gpu.rounds import by_graphs_and_eagerly, drive, paged, where_texts_part
from tests.makers import tiny_latent, write_recipe

NEAR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
TEXTS = [
    (f"row {i} " + "the " * (9 * i % 40), {"temperature": 0.3 * i, "seed": i, "max_tokens": 40, "ignore_eos": True})
    for i in range(4)
]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder: Path = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, names=["latent_attention"])
    return Context(torch.device("cuda", 0), folder)


def attend(
    context: Context, tensors: dict[str, np.ndarray], heads: int, splits: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``mixed``, 77 where the kernels write nothing, and the cache."""
    on_gpu = {name: to_torch(array).cuda() for name, array in tensors.items()}
    room = torch.full((len(on_gpu["query"]) * heads * RANK + 256,), 77.0, dtype=on_gpu["query"].dtype, device="cuda")
    on_gpu["mixed"] = room[:-256].view(len(on_gpu["query"]), heads * RANK)
    launch(on_gpu, {"heads": heads, "scale": SCALE, "splits": splits}, context).run()
    assert (room[-256:] == 77).all()
    return on_gpu["mixed"], on_gpu["cache"]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("splits", [None, 1, 3, 32])
@pytest.mark.parametrize(("heads", "query"), [(16, 1), (16, 5), (20, 2), (128, 1), (128, 5), (3, 17)])
def test_windows_equal_the_definition(context: Context, heads: int, query: int, splits: int | None, dtype: str) -> None:
    tensors = case([0, 63, 700, 129], query, heads=heads, dtype=KINDS[dtype])
    mixed, cache = attend(context, tensors, heads, splits)
    wanted, keys = reference(**tensors, heads=heads, scale=SCALE)
    live = slice(query, None)  # the first row is a free slot
    outputs, near = to_numpy(mixed)[live].astype(np.float64), NEAR[dtype]
    np.testing.assert_allclose(outputs, wanted[live].astype(np.float64), rtol=near, atol=near)
    written = np.setdiff1d(np.arange(len(keys)), [0])  # but the scratch block
    np.testing.assert_allclose(
        to_numpy(cache)[written].astype(np.float64), keys[written].astype(np.float64), rtol=near, atol=near
    )


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("runs", [[(0, 200)], [(0, 1), (63, 1), (64, 64), (5, 0), (129, 90), (700, 17)]])
def test_runs_next_to_windows_and_padding_equal_the_definition(
    context: Context, runs: list[tuple[int, int]], dtype: str
) -> None:
    tensors = case([30, 64], 2, runs, padding=9, heads=16, dtype=KINDS[dtype])
    mixed, _ = attend(context, tensors, 16)
    wanted, _ = reference(**tensors, heads=16, scale=SCALE)
    near = NEAR[dtype]
    outputs = to_numpy(mixed)[:-9].astype(np.float64)
    np.testing.assert_allclose(outputs, wanted[:-9].astype(np.float64), rtol=near, atol=near)
    assert (mixed[-9:] == 77).all()


@pytest.mark.parametrize("heads", [16, 20, 128])
def test_a_token_has_the_same_bits_in_any_window(context: Context, heads: int) -> None:
    tensors = case([500, 64], 17, heads=heads, dtype=KINDS["bfloat16"])
    whole = attend(context, tensors, heads)[0].view(2, 17, -1)
    cache = attend(context, tensors, heads)[1]
    for start, query in ((0, 1), (0, 5), (3, 1), (12, 5), (1, 16)):
        part = {name: tensors[name].reshape(2, 17, -1)[:, start : start + query] for name in ("query", "key")}
        part = {name: np.ascontiguousarray(each.reshape(2 * query, -1)) for name, each in part.items()}
        inputs = tensors | part | {"write_index": tensors["write_index"] + start, "cache": to_numpy(cache).copy()}
        outputs = attend(context, inputs, heads)[0].view(2, query, -1)
        assert torch.equal(outputs, whole[:, start : start + query])


def test_a_captured_call_serves_later_positions(context: Context) -> None:
    first, later = (case([length, 3], 5, heads=16, max_blocks=8, dtype=KINDS["bfloat16"]) for length in (70, 400))
    on_gpu = {name: to_torch(array).cuda() for name, array in first.items()}
    on_gpu["mixed"] = torch.full((10, 16 * RANK), 77.0, dtype=torch.bfloat16, device="cuda")
    call = launch(on_gpu, {"heads": 16, "scale": SCALE}, context)
    call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    for name, array in later.items():
        on_gpu[name].copy_(to_torch(array))
    graph.replay()
    assert torch.equal(on_gpu["mixed"], attend(context, later, 16)[0])


def bundle_of(folder: Path, dtype: str, **how: Any) -> Path:
    target, draft = tiny_latent(folder / "target", seed=1, **how), tiny_latent(folder / "draft", layers=1, seed=1)
    how = {"target": target, "draft": draft, "window": 4, "backend": paged(), "dtype": dtype, "prefill_chunk": 64}
    return build(Recipe.load(write_recipe(folder / "r.toml", **how)), folder / "bundle").folder


@pytest.mark.parametrize("kind", ["youtu", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_graphs_change_no_text_and_speculation_few(tmp_path: Path, dtype: str, kind: str) -> None:
    """Matmuls of a window and of one token may round differently, so texts of noise may part: most do not."""
    bundle = bundle_of(tmp_path, dtype, kind=kind)
    by_graphs, eagerly = by_graphs_and_eagerly(bundle, TEXTS)
    assert by_graphs == eagerly
    with LLM(bundle, num_draft_tokens=0) as llm:
        plain = drive(llm, TEXTS)
        assert set(llm.metrics.eager_runs) == {"prompts"}
    with LLM(bundle) as llm:
        outputs = drive(llm, TEXTS)
        assert llm.metrics.drafted > 0
    assert sum(at is None for at in where_texts_part(outputs, plain)) >= len(TEXTS) // 2
