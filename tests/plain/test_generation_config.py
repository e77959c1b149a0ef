"""Sampling parameters of generation_config.json: defaults of a request, rejected if invalid in a request."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandemrt import SamplingParams
from tandemrt.engines.parameters.generation_config import FILE_NAME, recommended
from tandemrt.engines.validation.errors import BadBundle, BadRequest

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
    assert recommended(write(tmp_path, QWEN3)) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_a_value_of_zero_is_a_value(tmp_path: Path) -> None:
    zeros = {"temperature": 0.0, "top_k": 0, "min_p": 0.0}
    assert recommended(write(tmp_path, zeros)) == zeros


@pytest.mark.parametrize("data", [{}, {"temperature": None, "eos_token_id": 2}])
def test_a_file_without_sampling_parameters_changes_nothing(tmp_path: Path, data: Any) -> None:
    assert recommended(tmp_path) == recommended(write(tmp_path, data)) == {}


@pytest.mark.parametrize("data", [{"temperature": -1}, {"top_k": 2.5}, "{", "[]", "[" * 100_000])
def test_a_parameter_that_is_invalid_in_a_request_is_rejected(tmp_path: Path, data: Any) -> None:
    with pytest.raises(BadBundle, match=r"generation_config.json: its sampling parameters .* generation_config=False"):
        recommended(write(tmp_path, data))


def test_a_request_overrides_the_file_even_with_a_default_value() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.5).over({"temperature": 0.6, "top_k": 20})
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 20, 0.5)
    assert SamplingParams().over({"temperature": 0.6}).temperature == 0.6
    assert SamplingParams(max_tokens=None).over({"max_tokens": 5}).max_tokens is None


def test_copies_keep_the_set_of_given_parameters() -> None:
    copied = SamplingParams(temperature=1.0).model_copy(update={"seed": 1}).checked()
    assert copied.over({"temperature": 0.6, "seed": 2}) == SamplingParams(temperature=1.0, seed=1)


def test_min_tokens_of_a_request_raises_max_tokens_of_the_file() -> None:
    assert SamplingParams(min_tokens=9).over({"max_tokens": 5}).max_tokens == 9
    with pytest.raises(BadRequest, match="min_tokens must be at most max_tokens"):
        SamplingParams(min_tokens=9, max_tokens=5).over({"max_tokens": 50})
