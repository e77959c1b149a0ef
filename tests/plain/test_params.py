"""Parameters out of range, of the wrong type or unknown are refused by name."""

from typing import Any

import pytest

from tandemrt import SamplingParams
from tandemrt.engines.errors import BadRequest


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
        ({"seed": 2**64}, "seed: "),
        ({"seed": 0.5}, "seed: "),
        ({"max_tokens": 0}, "max_tokens: must .*got 0"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens must be at most max_tokens \(4\); got 5"),
        ({"thinking_token_budget": -2}, "thinking_token_budget: must .*got -2"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget: must .*got 1.5"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": [1], "banned_token_ids": [1]}, "allowed_token_ids must leave a token"),
        ({"rule": "typical"}, "rule: .*'coupled' or 'rejection'; got 'typical'"),
        ({"window": -1}, "window: "),
        ({"timeout_s": 0}, "timeout_s: "),
        ({"presence_penalty": 0.5}, "unknown key 'presence_penalty'"),
        ({"temprature": 0.5}, "unknown key 'temprature' .did you mean 'temperature'"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
    ],
)
def test_a_parameter_that_cannot_be_meant_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize("off", [None, -1])
def test_no_budget_may_be_said_in_two_ways(off: int | None) -> None:
    assert SamplingParams(thinking_token_budget=off).thinking_token_budget == off


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
