"""Latent attention over a paged cache: texts, the cache without values, and what is rejected."""

from pathlib import Path

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.opening import open_models
from tests.engine.decoding import edit_config
from tests.engine.test_paged_rounds import PAGED
from tests.makers import tiny_latent, write_recipe


def test_drafts_change_no_text_and_the_cache_has_one_vector_per_token(tmp_path: Path) -> None:
    """With the steps that a GPU runs, and the operator's definition."""
    target, draft = tiny_latent(tmp_path / "t", "deepseek_v3", seed=1), tiny_latent(tmp_path / "d", layers=1, seed=1)
    recipe = write_recipe(tmp_path / "r.toml", target=target, draft=draft, window=3, backend=PAGED)
    bundle = build(Recipe.load(recipe), tmp_path / "bundle").folder
    names = [each.name for each in Bundle.open(bundle).engine("target").contract.inputs]
    assert [name for name in names if name.startswith("past_")] == ["past_key.0", "past_key.1"]
    texts = []
    for window in (0, 3):
        with LLM(bundle, device="cpu", threads=1, num_draft_tokens=window) as llm:
            [output] = llm.generate(["hello"], SamplingParams(temperature=0.8, seed=3, max_tokens=6))
            texts.append(output.token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("fields", "kv_dtype", "message"),
    [
        ({}, "float8_e4m3", r"target\.kv_dtype must be bfloat16 .* latent attention, .* no float8 form"),
        ({"kv_lora_rank": 256}, None, "latent vectors of 256 values and rotated keys of 64; .* 512 and 64 run"),
    ],
)
def test_other_caches_are_rejected_by_name(
    tmp_path: Path, fields: dict[str, int], kv_dtype: str | None, message: str
) -> None:
    target = tiny_latent(tmp_path / "t")
    edit_config(target, **fields)
    recipe = write_recipe(tmp_path / "r.toml", target=target, backend=PAGED, dtype="bfloat16")
    with pytest.raises((BadCheckpoint, BadRecipe), match=message):
        open_models(Recipe.load(recipe, kv_dtype=kv_dtype))
