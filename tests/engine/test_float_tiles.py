"""Unquantized weights on a CPU: the tiles that a build adds hold the checkpoint's values in its dtype."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.export.quantize.float_tiles import FILE
from tandemrt.plugins.operators.float_tiles import tiled, untiled
from tests.makers import tiny_checkpoint, write_recipe

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "t", layers=1)


def built(checkpoint: Path, folder: Path) -> Path:
    recipe = write_recipe(folder.with_suffix(".toml"), target=checkpoint, dtype="float32")
    return build(Recipe.load(recipe), folder).folder


def in_dtype(checkpoint: Path, dtype: torch.dtype) -> None:
    """Round the weights of ``checkpoint`` to ``dtype`` and store them in it."""
    file = checkpoint / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_in_16_bits_give_the_bits_of_the_same_weights_in_float32(
    checkpoint: Path, tmp_path: Path, dtype: str
) -> None:
    outputs = []
    in_dtype(checkpoint, DTYPES[dtype])
    for stored in (DTYPES[dtype], torch.float32):
        in_dtype(checkpoint, stored)
        folder = built(checkpoint, tmp_path / str(stored))
        tiles = load_file(folder / "target" / FILE)
        assert {tensor.dtype for tensor in tiles.values()} == {stored}
        with LLM(folder, threads=1) as llm:
            output = llm.generate(
                [7, 8, 9], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
            )
        outputs.append((output.token_ids, output.logprobs))
    assert outputs[0] == outputs[1]


def test_tiles_hold_the_values_of_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    tiles = load_file(built(checkpoint, tmp_path / "bundle") / "target" / FILE)
    weights = load_file(checkpoint / "model.safetensors")
    assert {name.removesuffix(".tiles") for name in tiles} >= {"lm_head.weight", "model.layers.0.mlp.down_proj.weight"}
    for name, values in tiles.items():
        weight = weights[name.removesuffix(".tiles")]
        np.testing.assert_array_equal(untiled(values.numpy())[: len(weight)], weight.numpy(), name)


@pytest.mark.parametrize("shape", [(1, 3), (16, 8), (37, 5)])
def test_a_tile_is_padded_with_zeros(shape: tuple[int, int]) -> None:
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    rows = untiled(tiled(weight))
    np.testing.assert_array_equal(rows[: shape[0]], weight)
    assert not rows[shape[0] :].any()
