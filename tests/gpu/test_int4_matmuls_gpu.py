"""Weights in 4 bits on a CUDA device: logits, and texts by CUDA graphs and without."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.plugins.kernels import int4_matmul
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.operators.launch import Context
from tests.engine import quantized
from tests.engine.implementation_cases import cases, hold
from tests.engine.test_quantized_checkpoints import INT4
from tests.gpu.here import compute_capabilities
from tests.gpu.quantized_logits import check_logits
from tests.gpu.rounds import by_graphs_and_eagerly, paged, where_windows_part
from tests.makers import write_recipe


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    dtypes = ["bfloat16", "float16"]
    compile_kernels(
        compute_capabilities(), folder, names=["attention", "swiglu", "int4"], dtypes=dtypes, head_dims=[64]
    )
    return folder


@pytest.mark.parametrize(("dtype", "near"), [("bfloat16", 0.03), ("float16", 0.005)])
@pytest.mark.parametrize("case", INT4)
def test_logits_are_those_that_the_checkpoint_means(
    tmp_path: Path, kernels: Path, case: str, dtype: str, near: float
) -> None:
    model = INT4[case].write(tmp_path)
    quantized.packed(tmp_path, dtype)
    check_logits(tmp_path / "packed", model, kernels, dtype, near=near)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_become_numbers_a_part_at_a_time(kernels: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4_matmul, "_SCRATCH", 400_000)  # bytes: parts of 256 outputs
    context = Context(torch.device("cuda", 0), kernels)
    for case in [*cases("int4_matmul", dtype)][-2:]:
        hold("int4_matmul", case, context)


@pytest.mark.parametrize(("width", "inner"), [(264, 128), (4096, 1024), (20_000, 320)])
def test_a_row_has_the_same_bits_in_any_company_of_up_to_64(kernels: Path, width: int, inner: int) -> None:
    context, draw = Context(torch.device("cuda", 0), kernels), torch.Generator("cuda").manual_seed(3)
    on_device: dict[str, Any] = {"device": "cuda", "generator": draw}
    padded = -(-inner // 128) * 128
    weight = torch.randint(0, 256, (width, padded // 2), dtype=torch.uint8, **on_device)
    scales = (torch.rand(width, padded // 32, **on_device) + 0.5).bfloat16()
    x = torch.randn(64, inner, **on_device).bfloat16()

    def multiplied(rows: int) -> torch.Tensor:
        out = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda")
        tensors = {"x": x[:rows], "weight": weight, "scales": scales, "out": out}
        int4_matmul.launch(tensors, {"group_size": 32}, context).run()
        return out

    all_rows = multiplied(64)
    for rows in (1, 5, 8, 9, 16, 17, 33):
        assert torch.equal(multiplied(rows), all_rows[:rows]), rows


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and draft in 4 bits, their heads too."""
    folder, case = tmp_path_factory.mktemp("bundle"), INT4["gptq_v2, zero points"]
    target, draft = quantized.write_pair(folder, case.config | {"lm_head": True}, case.store)
    write_recipe(folder / "r.toml", target=target, draft=draft, backend=paged(), dtype="bfloat16")
    return build(Recipe.load(folder / "r.toml"), folder / "bundle").folder


def test_cuda_graphs_change_no_token(bundle: Path) -> None:
    by_graphs, eagerly = by_graphs_and_eagerly(bundle)
    assert by_graphs == eagerly


def test_draft_windows_are_compared_with_autoregressive_decoding(bundle: Path) -> None:
    """They may round differently, and then the texts of noise part: reported, and not at once."""
    assert all(at is None or at > 0 for at in where_windows_part(bundle))
