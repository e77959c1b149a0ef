"""GGUF files on a CUDA device: logits of every type, and texts with drafts and without."""

from pathlib import Path

import pytest

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.gguf import kept_types
from tandemrt.plugins.kernels.compile import compile_kernels
from tests.engine.gguf_files import write_gguf
from tests.engine.test_gguf_packed import HEAD, MXFP4, packed_model
from tests.gpu.here import compute_capabilities
from tests.gpu.quantized_logits import check_logits
from tests.gpu.rounds import EVEN, by_graphs_and_eagerly, check_invisible, paged
from tests.makers import tiny_checkpoint, write_recipe

TYPES = ("Q4_0", "Q8_0", "Q5_0", "IQ4_NL", "Q4_K", "Q6_K", "IQ4_XS")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ["attention", "swiglu", "int4", "int8", "k_quants", "experts", "experts_float4"]
    folder = tmp_path_factory.mktemp("kernels")
    dtypes = ["bfloat16", "float16"]
    compile_kernels(compute_capabilities(), folder, names=names, dtypes=dtypes, head_dims=[64])
    return folder


@pytest.mark.parametrize(("dtype", "near"), [("bfloat16", 0.03), ("float16", 0.005)])
@pytest.mark.parametrize("kind", [*TYPES, "MXFP4"])
def test_logits_are_those_of_the_dequantized_values(
    tmp_path: Path, kernels: Path, kind: str, dtype: str, near: float
) -> None:
    case, name, kinds = ("gpt_oss", "gpt-oss", MXFP4) if kind == "MXFP4" else ("qwen2", "qwen2", {HEAD: kind})
    kept = kept_types(on_cpu=False, paged=True, compute=dtype, draft_shares=False)
    matrices = "F32" if kind == "MXFP4" else kind
    _, model = packed_model(tmp_path, case, name, kinds, kept, kind=matrices, tiles=dtype)
    check_logits(tmp_path / "packed", model, kernels, dtype, near=near)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target in the types of Q4_K_M and a draft in Q6_K, both GGUF files."""
    folder = tmp_path_factory.mktemp("bundle")
    for role, kind, layers in (("target", "Q4_K", 2), ("draft", "Q6_K", 1)):
        checkpoint = tiny_checkpoint(folder / f"{role}-hf", layers=layers, hidden=256, head_dim=64, seed=1)
        kinds = {f"model.layers.{layer}.mlp.down_proj.weight": "Q6_K" for layer in range(layers)} | {HEAD: "Q6_K"}
        write_gguf(
            checkpoint, folder / f"{role}.gguf", "qwen3", kind, kinds=kinds, pre="qwen2", rope_freq_base=10_000.0
        )
    return {role: folder / f"{role}.gguf" for role in ("target", "draft")}


def test_cuda_graphs_change_no_token(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path / "cache"))
    recipe = write_recipe(tmp_path / "r.toml", **files, backend=paged(), dtype="bfloat16")
    by_graphs, eagerly = by_graphs_and_eagerly(build(Recipe.load(recipe), tmp_path / "bundle").folder)
    assert by_graphs == eagerly


def test_speculation_changes_no_text(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path / "cache"))
    backend = paged() + "\nbatch_invariant = true"
    recipe = write_recipe(tmp_path / "r.toml", **files, backend=backend, dtype="bfloat16")
    check_invisible(build(Recipe.load(recipe), tmp_path / "bundle").folder, EVEN)
