"""Rules of the paged operators: the last model that each supports, and its neighbour that is rejected with the rule."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tandemrt.export.model.support import unsupported
from tandemrt.export.read.layer import ClampedSwiglu, OutputGate, Router
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators.constants import HEAD_DIMS
from tests.plain.test_families import PUBLISHED


def spec(name: str) -> ModelSpec:
    return ModelSpec.from_hf(json.loads(PUBLISHED[name][0]))


CONVOLUTIONS, STATES, DELTA = "LFM2-1.2B", "Falcon-H1-1.5B-Instruct", "Qwen3.5-27B"
EXPERTS, LATENT, PLAIN = "Qwen3-30B-A3B", "DeepSeek-V3", "Qwen3-VL-4B-Instruct"


@pytest.mark.parametrize(
    ("name", "part", "valid", "invalid", "rule"),
    [
        (CONVOLUTIONS, "recurrent", {"kernel": 8}, {"kernel": 9}, "convolutions of 9 tokens"),
        (CONVOLUTIONS, "recurrent", {"channels": 2046}, {"channels": 2047}, "of 2047 channels"),
        (STATES, "recurrent", {"kernel": 8}, {"kernel": 9}, "a convolution of 9 tokens"),
        (STATES, "recurrent", {"heads": 46}, {"heads": 45}, "45 heads"),
        (DELTA, "recurrent", {"kernel": 8}, {"kernel": 9}, "a convolution of 9 tokens"),
        (DELTA, "recurrent", {"value_heads": 46}, {"value_heads": 45}, "45 heads"),
        (DELTA, "recurrent", {"key_dim": 96}, {"key_dim": 256}, "keys of 256 values"),
        (DELTA, "recurrent", {"value_dim": 112}, {"value_dim": 120}, "values of 120"),
        (LATENT, "latent", {"rank": 512}, {"rank": 256}, "latent vectors of 256 values"),
        (LATENT, "latent", {"rotated": 64}, {"rotated": 32}, "rotated keys of 32"),
        (EXPERTS, "experts", {"count": 512}, {"count": 513}, "of 513 experts"),
        (EXPERTS, "experts", {"per_token": 32}, {"per_token": 33}, "has 33 of"),
        (EXPERTS, "experts", {"intermediate": 776}, {"intermediate": 772}, "experts of 772 values"),
        (EXPERTS, "experts", {"gate_up": "halves"}, {"weighted_input": True}, "experts with weighted"),
        (EXPERTS, "experts", {"biased": True}, {"latent": 64}, "or latent inputs"),
        (
            EXPERTS,
            "experts",
            {"clamped": ClampedSwiglu(1.702, 7.0)},
            {"clamped": ClampedSwiglu(1.0, 7.0, clamped_after=True)},
            "a bound after the activation",
        ),
        (PLAIN, "variants", {"value_norm": True}, {"value_dim": 64}, "values smaller than keys"),
        (PLAIN, "variants", {"scaled": True}, {"gate": OutputGate()}, "gates of heads"),
        (
            EXPERTS,
            "experts",
            {"normalized": True, "router": Router(correction=True)},
            {"normalized": False, "router": Router(correction=True)},
            "not normalized",
        ),
        (
            EXPERTS,
            "experts",
            {"normalized": False, "router": Router(scale=2.5)},
            {"normalized": False, "router": Router(scoring="sigmoid")},
            "not normalized",
        ),
        (PLAIN, "scales", {"attention_softcap": 0.0}, {"attention_softcap": 50.0}, "attn_logit_softcapping is 50"),
        (PLAIN, "qk_norm", {"after_rotary": False}, {"after_rotary": True}, "norms queries and keys after the rotary"),
        (PLAIN, "rope", {"query_scale_beta": 0.0}, {"query_scale_beta": 0.1}, "llama_4_scaling_beta is 0.1"),
    ],
)
def test_paged_operators_support_a_model_and_not_its_neighbour(
    name: str, part: str, valid: dict[str, Any], invalid: dict[str, Any], rule: str
) -> None:
    model = spec(name)
    supported, rejected = (replace(model, **{part: replace(getattr(model, part), **c)}) for c in (valid, invalid))
    assert unsupported(supported, "paged", 128) is None
    assert rule in str(unsupported(rejected, "paged", 128))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (STATES, "recurrent layers, which run with"),
        (EXPERTS, "experts, which run with"),
        (LATENT, "experts, which run with"),
        ("gemma-4-E2B-it", "layers of different shapes"),
        ("gpt-oss-20b", "experts and attention sinks"),
    ],
)
def test_parts_of_a_model_need_their_lowering(name: str, rule: str) -> None:
    assert unsupported(spec(name), "grouped", 128) is None
    assert rule in str(unsupported(spec(name), "mask", 128))


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-4-E2B-it", "gemma-4-31B-it", "gemma-4-26B-A4B-it"])
def test_a_paged_cache_takes_the_models_that_are_deployed_most(name: str) -> None:
    assert unsupported(spec(name), "paged", 128) is None
    assert set(spec(name).head_dims) <= set(HEAD_DIMS)


def test_learned_positions_need_a_linear_cache() -> None:
    assert unsupported(spec("opt-1.3b"), "grouped", 128) is None
    assert "learned positions" in str(unsupported(spec("opt-1.3b"), "paged", 128))


def test_a_row_over_a_linear_cache_is_no_longer_than_the_window() -> None:
    model = replace(spec(PLAIN), sliding_window=128)
    assert unsupported(model, "length", 128) is None
    assert "sliding_window is 128 and the capacity 129" in str(unsupported(model, "length", 129))
    assert unsupported(model, "mask", 129) is None
