"""Hybrid models on a CPU: recurrent layers change nothing about speculation, prompts and slots."""

from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.opening import open_models
from tests.engine.test_invisible import REQUESTS, check_reversed_and_one_by_one, output_of, outputs
from tests.engine.test_paged_rounds import PAGED
from tests.makers import ON_A_GPU, tiny_checkpoint, tiny_hybrid, write_recipe

NGRAM = 'kind = "ngram"\nnum_draft_tokens = 8\nngram_min = 1'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture(scope="module")
def bundles(folder: Path) -> dict[str, Path]:
    """Bundles by draft: n-gram, an independent hybrid model, the target itself, and a model with attention alone."""
    target = tiny_hybrid(folder / "target", seed=1)
    drafts: dict[str, dict[str, Any]] = {
        "ngram": {"drafting": NGRAM},
        "hybrid": {"draft": tiny_hybrid(folder / "draft", layers=3, seed=1), "window": 8},
        "target": {"draft": target, "window": 4},
        "attention": {"draft": tiny_checkpoint(folder / "attention", layers=1, seed=1), "window": 8},
    }
    return {
        name: build(
            Recipe.load(write_recipe(folder / f"{name}.toml", target=target, **how)), folder / f"{name}-bundle"
        ).folder
        for name, how in drafts.items()
    }


@pytest.fixture(scope="module")
def autoregressive(bundles: dict[str, Path]) -> list[Any]:
    return [output_of(output) for output in outputs(bundles["ngram"], num_draft_tokens=0)]


@pytest.mark.parametrize("draft", ["ngram", "hybrid", "attention"])
def test_drafts_change_no_token(bundles: dict[str, Path], autoregressive: list[Any], draft: str) -> None:
    drafted = outputs(bundles[draft])
    assert [output_of(output) for output in drafted] == autoregressive
    assert sum(output.speculation.num_accepted_draft_tokens for output in drafted) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_the_target_itself_are_accepted(bundles: dict[str, Path], temperature: float) -> None:
    """All but those after the end: the draft's state is the target's after every round."""
    requests = [(prompt, {"temperature": temperature, "seed": 5, "max_tokens": 40}) for prompt in ("a", "and the " * 3)]
    for output in outputs(bundles["target"], requests=requests, lookup=False):
        unaccepted = output.speculation.num_draft_tokens - output.speculation.num_accepted_draft_tokens
        assert unaccepted <= 4


def test_overlap_and_adaptive_draft_lengths_change_no_token(
    bundles: dict[str, Path], autoregressive: list[Any]
) -> None:
    drafted = outputs(bundles["hybrid"], overlap=True, adaptive_draft_tokens=True)
    assert [output_of(output) for output in drafted] == autoregressive


def test_other_requests_and_slots_change_no_token(bundles: dict[str, Path], autoregressive: list[Any]) -> None:
    check_reversed_and_one_by_one(bundles["hybrid"], REQUESTS, autoregressive)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_drafts_change_no_token_with_quantized_weights(folder: Path, dtype: str) -> None:
    target = tiny_hybrid(folder / dtype, seed=2)
    recipe = write_recipe(folder / f"{dtype}.toml", target=target, drafting=NGRAM, dtype=dtype)
    bundle = build(Recipe.load(recipe), folder / f"{dtype}-bundle").folder
    texts = [[output_of(output) for output in outputs(bundle, num_draft_tokens=window)] for window in (0, 8)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("backend", "dtype", "message"),
    [
        (
            PAGED,
            "bfloat16",
            "4 heads, keys of 16 values, .* on a GPU keys of 32, 64, 96, 128 run, .* onnxruntime-cpu",
        ),
        (
            'name = "onnxruntime-cuda"\ncache = "linear"',
            "bfloat16",
            "has recurrent layers, which run with .* paged cache",
        ),
        ('name = "tensorrt"', "bfloat16", "has recurrent layers, which run with onnxruntime-cuda over a paged cache"),
        (
            'name = "tensorrt-rtx"\ncompute_capabilities = ["8.9"]',
            "bfloat16",
            "has recurrent layers, which run with onnxruntime-cuda over a paged cache",
        ),
        ('name = "onnxruntime-cpu"', "float16", "float32, int8 or int4 for a model with recurrent layers"),
    ],
)
def test_other_backends_are_rejected_by_name(folder: Path, backend: str, dtype: str, message: str) -> None:
    target = tiny_hybrid(folder / "rejected")
    recipe = write_recipe(folder / "rejected.toml", target=target, backend=backend, dtype=dtype)
    with pytest.raises((BadCheckpoint, BadRecipe), match=message):
        open_models(Recipe.load(recipe))


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (
            {"dtype": "float32"},
            "target.dtype must be bfloat16 or float16 for attention heads of 256 values .*'float32'",
        ),
        (
            {"dtype": "bfloat16", "kv_dtype": "float8_e4m3"},
            "target.kv_dtype must be bfloat16 or float16 for attention heads of 256 values .*'float8_e4m3fn'",
        ),
    ],
)
def test_wide_heads_on_a_gpu_are_rejected_in_dtypes_that_never_ran(
    folder: Path, dtypes: dict[str, str], message: str
) -> None:
    target = tiny_hybrid(folder / "wide", head_dim=256, **ON_A_GPU)
    recipe = write_recipe(folder / "wide.toml", target=target, backend=PAGED, dtype=dtypes["dtype"])
    with pytest.raises(BadRecipe, match=message):
        open_models(Recipe.load(recipe, kv_dtype=dtypes.get("kv_dtype")))
