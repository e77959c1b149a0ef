"""What a checkpoint recommends: taken where a request says nothing, refused where no request could ask for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandemrt import SamplingParams
from tandemrt.engines.errors import BadBundle, BadRequest
from tandemrt.engines.generation_config import FILE_NAME, recommended

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def write(folder: Path, data: Any) -> Path:
    (folder / FILE_NAME).write_text(data if isinstance(data, str) else json.dumps(data))
    return folder


def test_the_sampling_parameters_of_a_published_file_are_read(tmp_path: Path) -> None:
    """D9."""
    assert recommended(write(tmp_path, QWEN3)) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize("data", [{}, {"temperature": None, "eos_token_id": 2}])
def test_a_file_that_recommends_nothing_changes_nothing(tmp_path: Path, data: Any) -> None:
    assert recommended(tmp_path) == recommended(write(tmp_path, data)) == {}


@pytest.mark.parametrize("data", [{"temperature": -1}, {"top_k": 2.5}, "{", "[]", "[" * 100_000])
def test_a_recommendation_that_no_request_could_ask_for_is_refused(tmp_path: Path, data: Any) -> None:
    with pytest.raises(BadBundle, match=r"generation_config.json: its sampling parameters .* generation_config=False"):
        recommended(write(tmp_path, data))


def test_what_a_request_gives_comes_before_what_is_recommended_even_where_it_is_the_default() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.5).over({"temperature": 0.6, "top_k": 20})
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 20, 0.5)
    assert SamplingParams().over({"temperature": 0.6}).temperature == 0.6
    assert SamplingParams(max_tokens=None).over({"max_tokens": 5}).max_tokens is None


def test_what_was_given_stays_given_through_copies() -> None:
    copied = SamplingParams(temperature=1.0).model_copy(update={"seed": 1}).checked()
    assert copied.over({"temperature": 0.6, "seed": 2}) == SamplingParams(temperature=1.0, seed=1)


def test_a_recommended_length_gives_way_to_the_least_that_was_asked_for() -> None:
    assert SamplingParams(min_tokens=9).over({"max_tokens": 5}).max_tokens == 9
    with pytest.raises(BadRequest, match="min_tokens must be at most max_tokens"):
        SamplingParams(min_tokens=9, max_tokens=5).over({"max_tokens": 50})
