"""Sampling parameters: invalid values and unknown names are rejected with the name."""

from typing import Any

import pytest

from tandemrt import SamplingParams, StructuredOutputs
from tandemrt.engines.contract.sampling_parameters import FILTERS
from tandemrt.engines.validation.errors import BadRequest


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, "temperature: must .*got -0.1"),
        ({"temperature": float("nan")}, "temperature: must .*got nan"),
        ({"temperature": "hot"}, "temperature: .*'hot'"),
        ({"top_p": 0.0}, "top_p: must .*got 0.0"),
        ({"top_p": 1.5}, "top_p: must .*got 1.5"),
        ({"top_p": 1e-50}, "top_p: must .*got 1e-50"),
        ({"top_k": -2}, "top_k: must .*got -2"),
        ({"top_k": 1.5}, "top_k: must .*got 1.5"),
        ({"top_k": 2**63}, "top_k: must .*got 9223372036854775808"),
        ({"min_p": 1.01}, "min_p: "),
        ({"top_n_sigma": -1.0}, "top_n_sigma: must .*got -1.0"),
        ({"top_n_sigma": 1e-50}, "top_n_sigma: must be 0, which means off, or at least .*got 1e-50"),
        ({"seed": 2**64}, "seed: "),
        ({"seed": 0.5}, "seed: "),
        ({"max_tokens": 0}, "max_tokens: must .*got 0"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens must be at most max_tokens \(4\); got 5"),
        ({"thinking_token_budget": -2}, "thinking_token_budget: must .*got -2"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget: must .*got 1.5"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": [1], "banned_token_ids": [1]}, "allowed_token_ids must have a token"),
        ({"cache_salt": ""}, "cache_salt: must .*got ''"),
        ({"cache_salt": 7}, "cache_salt: must be a valid string; got 7"),
        ({"cache_salt": b"salt"}, "cache_salt: must be a valid string; got b'salt'"),
        ({"rule": "typical"}, "rule: .*'coupled', 'rejection' or 'synthetic'; got 'typical'"),
        ({"num_draft_tokens": -1}, "num_draft_tokens: "),
        ({"draft_sampling": "typical"}, "draft_sampling: .*'coupled'; got 'typical'"),
        ({"draft_sampling": "probabilistic"}, "must be greedy or coupled under the rule coupled; got probabilistic"),
        (
            {"draft_sampling": "coupled", "rule": "rejection"},
            "must be greedy or probabilistic under the rule rejection",
        ),
        ({"draft_greedy_below": -0.5}, "draft_greedy_below: must be at least 0.0; got -0.5"),
        (
            {"draft_sampling": "greedy", "draft_temperature_scale": 0.5},
            "draft_temperature_scale must not be set with draft_sampling greedy, .* got 0.5. Leave one of them out",
        ),
        ({"draft_temperature_scale": 0}, "draft_temperature_scale: must be at least 0.01; got 0"),
        ({"draft_temperature_scale": 10.5}, "draft_temperature_scale: must be at most 10.0; got 10.5"),
        ({"timeout_s": 0}, "timeout_s: "),
        ({"presence_penalty": 2.1}, "presence_penalty: must be at most 2.0; got 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty: must be at least -2.0; got -2.1"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be at least .*; got 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty: must be a finite number; got inf"),
        ({"logit_bias": {7: 100.5}}, "logit_bias.7: must be at most 100.0; got 100.5"),
        ({"logit_bias": {"7": -101}}, "logit_bias.7: must be at least -100.0; got -101"),
        ({"logit_bias": {-1: 1}}, "logit_bias.-1.*: must be at least 0; got -1"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x.*: must be a valid integer; got 'x'"),
        ({"logit_bias": {7: 1, "07": 2}}, "logit_bias: must have one bias per token; got several for 7"),
        ({"logit_bias": [7]}, r"logit_bias: must be a valid dictionary; got \[7\]"),
        ({"stop": ["a"] * 257}, "stop: must have at most 256 strings; got 257"),
        ({"stop": ["ab", "c" * 8191]}, "stop: must have at most 8192 characters in all; got 8193"),
        ({"logit_bias": dict.fromkeys(range(1025), 0)}, "logit_bias: must have at most 1024 tokens; got 1025"),
        ({"mirostat_tau": 0.5}, "unknown key 'mirostat_tau'"),
        ({"temprature": 0.5}, "unknown key 'temprature' .did you mean 'temperature'"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
    ],
)
def test_an_invalid_parameter_is_rejected(params: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize("off", [None, -1])
def test_minus_one_and_none_mean_no_thinking_budget(off: int | None) -> None:
    assert SamplingParams(thinking_token_budget=off).thinking_token_budget == off


def test_a_single_stop_string_needs_no_list() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_logit_bias_accepts_token_ids_as_json_keys() -> None:
    assert SamplingParams(logit_bias={"7": 1, 8: -2.5}).logit_bias == {7: 1.0, 8: -2.5}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "timeout_s"],
)
@pytest.mark.parametrize("value", [True, "1", b"1"])
def test_booleans_and_texts_are_not_numbers(name: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=f"{name}: must be a number; got {value!r}"):
        SamplingParams(**{name: value})
    with pytest.raises(BadRequest, match=r"logit_bias.7: must be a number"):
        SamplingParams(logit_bias={7: value})


def test_bytes_are_not_text() -> None:
    for asked in ({"regex": b"a"}, {"grammar": b"a"}, {"choice": [b"a"]}, {"json": b"{}"}):
        with pytest.raises(BadRequest, match=r"must be a valid string"):
            StructuredOutputs(**asked)
    with pytest.raises(BadRequest, match=r"stop.0: must be a valid string"):
        SamplingParams(stop=[b"a"])


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "num_draft_tokens", "thinking_token_budget", "top_k"])
def test_integers_have_64_bits(name: str) -> None:
    for value in (2**63, 10**5000):
        with pytest.raises(BadRequest, match=rf"{name}: must be less than 9223372036854775808; got "):
            SamplingParams(**{name: value})


def test_a_copy_is_validated_like_the_original() -> None:
    params = SamplingParams(seed=1, structured_outputs=StructuredOutputs(json={"type": "null"}))
    assert params.model_copy() == params
    changed = params.model_copy(update={"num_draft_tokens": 0}, deep=True)
    assert (changed.seed, changed.num_draft_tokens, changed.structured_outputs) == (1, 0, params.structured_outputs)
    with pytest.raises(BadRequest, match=r"temperature: must be at least 0.0; got -1"):
        params.model_copy(update={"temperature": -1})
    with pytest.raises(BadRequest, match="unknown key 'temprature'"):
        params.model_copy(update={"temprature": 1})
    with pytest.raises(BadRequest, match="exactly one of"):
        StructuredOutputs(regex="a").model_copy(update={"choice": ["b"]})


def test_checked_detects_values_that_bypassed_validation() -> None:
    forged, changed = SamplingParams.model_construct(temperature=-1.0), SamplingParams()
    changed.__dict__["top_p"] = 7
    within = SamplingParams.model_construct(structured_outputs=StructuredOutputs.model_construct(regex=""))
    for params, message in (
        (forged, "temperature: must be at least 0.0; got -1.0"),
        (changed, "top_p: must be at most 1.0; got 7"),
        (within, "^structured_outputs: regex: must not be empty; got ''$"),
    ):
        with pytest.raises(BadRequest, match=message):
            params.checked()


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_is_off_by_default_and_on_with_any_other_value(name: str) -> None:
    assert SamplingParams.model_fields[name].default == FILTERS[name].off
    assert not SamplingParams().filters
    assert not SamplingParams(**{name: FILTERS[name].off}).filters
    assert SamplingParams(**{name: 0.5 if FILTERS[name].dtype == "float32" else 5}).filters


def test_a_negative_top_k_turns_it_off() -> None:
    params = SamplingParams(top_k=-1)
    assert not params.filters
    assert params.filter_values()["top_k"] == 0


def test_biases_are_counted_before_they_are_read() -> None:
    class Unreadable(dict[int, float]):
        def items(self) -> Any:
            raise AssertionError("read before they were counted")

    with pytest.raises(BadRequest, match="logit_bias: must have at most 1024 tokens; got 1025"):
        SamplingParams(logit_bias=Unreadable.fromkeys(range(1025), 0.0))
