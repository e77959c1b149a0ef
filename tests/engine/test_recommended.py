"""Recommended parameters of a checkpoint apply to requests that do not set them, and never reject a prompt."""

import json
from collections.abc import Iterator

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.export.bundle.build import build
from tests.makers import tiny_checkpoint, write_recipe

RECOMMENDED = 20


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("recommended")
    target = tiny_checkpoint(folder / "target", seed=1)
    (target / "generation_config.json").write_text(json.dumps({"max_new_tokens": RECOMMENDED, "eos_token_id": 255}))
    bundle = build(Recipe.load(write_recipe(folder / "tiny.toml", target=target)), folder / "bundle").folder
    with LLM(bundle, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("room", [RECOMMENDED + 1, RECOMMENDED, RECOMMENDED - 1, 1])
def test_recommended_max_tokens_are_used_up_to_the_room_of_the_prompt(llm: LLM, room: int) -> None:
    prompt = [5] * (llm.bundle.limits.length - room)
    output = llm.generate(prompt, SamplingParams(ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (min(room, RECOMMENDED), "length")


@pytest.mark.parametrize("asked", [1, RECOMMENDED + 1, None])
def test_max_tokens_of_a_request_replace_the_recommended_ones(llm: LLM, asked: int | None) -> None:
    prompt, room = [5] * 60, llm.bundle.limits.length - 60
    output = llm.generate(prompt, SamplingParams(ignore_eos=True, max_tokens=asked))
    assert len(output.token_ids) == (room if asked is None else asked)
    with pytest.raises(
        BadRequest, match=f"max_tokens: .* an output of {room + 1} was asked for; ask for at most {room}"
    ):
        llm.generate(prompt, SamplingParams(max_tokens=room + 1))
