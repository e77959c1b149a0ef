"""Every bound of a parameter, an option and a recipe's key: the values at it are accepted, the next ones refused."""

from dataclasses import fields
from math import inf, nextafter
from typing import Any, get_type_hints

import pytest
from pydantic import ValidationError

from tandemrt import SamplingParams
from tandemrt.engines.bundle.manifest import Limits, ReasoningDelimiters
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.recipe.backends import OnnxRuntimeCuda
from tandemrt.engines.recipe.models import HeadDraft, ModelDraft, NgramDraft, NoDraft
from tandemrt.engines.recipe.recipe import Reasoning, RecipeLimits
from tandemrt.engines.recipe.tensorrt import TensorRt
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.servers.http.config import ServerConfig

SMALLEST, LARGEST = 2.0**-126, 2.0**126  # of normal floats of 32 bits, and its reciprocal
SIGNED, UNSIGNED, SHORT = 2**63, 2**64, 2**31
MANY = 1 << 18

# Default, accepted values, refused values.
PARAMETERS: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "temperature": (1.0, (0, 100), (-0.001, 100.001, inf)),
    "top_p": (1.0, (SMALLEST, 1), (SMALLEST / 2, 1.001)),
    "top_k": (0, (-1, SIGNED - 1), (-2, SIGNED)),
    "min_p": (0.0, (0, 1), (-0.001, 1.001)),
    "top_n_sigma": (0.0, (0, SMALLEST, 100), (-0.001, SMALLEST / 2, 100.001)),
    "seed": (None, (-SIGNED, UNSIGNED - 1), (-SIGNED - 1, UNSIGNED)),
    "presence_penalty": (0.0, (-2, 2), (-2.001, 2.001)),
    "frequency_penalty": (0.0, (-2, 2), (-2.001, 2.001)),
    "repetition_penalty": (1.0, (SMALLEST, LARGEST), (SMALLEST / 2, nextafter(LARGEST, inf))),
    "logit_bias": (
        None,
        ({0: -100}, {SIGNED - 1: 100}, dict.fromkeys(range(1024), 0)),
        ({0: -100.1}, {0: 100.1}, {-1: 0}, {SIGNED: 0}, dict.fromkeys(range(1025), 0)),
    ),
    "max_tokens": (None, (1, SIGNED - 1), (0, SIGNED)),
    "min_tokens": (0, (0, SIGNED - 1), (-1, SIGNED)),
    "stop": ((), (["a"] * 256, ["a" * 8192]), ([""], ["a"] * 257, ["a" * 8193])),
    "include_stop_str_in_output": (False, (True,), (1,)),
    "skip_special_tokens": (True, (False,), (0,)),
    "stop_token_ids": ((), ([0], [SIGNED - 1], [0] * MANY), ([-1], [SIGNED], [0] * (MANY + 1))),
    "ignore_eos": (False, (True,), (1,)),
    "allowed_token_ids": (None, ([0], [SIGNED - 1]), ([], [-1], [SIGNED])),
    "banned_token_ids": ((), ([0], [SIGNED - 1]), ([-1], [SIGNED])),
    "bad_words": ((), (["a"] * 256, ["a" * 8192]), ([""], ["a"] * 257, ["a" * 8193])),
    "thinking_token_budget": (None, (-1, 0, SIGNED - 1), (-2, SIGNED)),
    "structured_outputs": (None, ({"regex": "a"}, {"json": {}}), ({"regex": ""}, {"json": {}, "regex": "a"}, {})),
    "logprobs": (None, (0, 20, False), (-1, 21, True)),
    "logprobs_mode": ("processed", ("raw",), ("all",)),
    "prompt_logprobs": (None, (0, 20, False), (-1, 21, True)),
    "n": (1, (1, 128), (0, 129)),
    "truncate_prompt_tokens": (None, (-1, 1, SIGNED - 1), (-2, 0, SIGNED)),
    "priority": (0, (-SHORT, SHORT - 1), (-SHORT - 1, SHORT)),
    "cache_salt": (None, ("a",), ("",)),
    "rule": ("coupled", ("rejection",), ("synthetic", "greedy")),
    "synthetic_acceptance_length": (None, (), (1, 17)),
    "draft_sampling": (None, ("greedy", "coupled"), ("probabilistic",)),
    "draft_greedy_below": (None, (0, 100), (-0.001, 100.001)),
    "draft_temperature_scale": (None, (0.01, 10), (0.009, 10.001)),
    "num_draft_tokens": (None, (0, SIGNED - 1), (-1, SIGNED)),
    "timeout_s": (None, (0.001,), (0, inf)),
}
OPTIONS: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "device": (None, ("cpu", "cpu:0", "cuda:99"), ("cpu:1", "cuda:100", "gpu")),
    "num_draft_tokens": (None, (0, {1: 0, 2: 4}), (-1, True, {0: 1, 1: 1}, {2: 1})),
    "adaptive_draft_tokens": (None, (False, True), (1,)),
    "lookup": (None, (False, True), (1,)),
    "overlap": (None, (False, True), (1,)),
    "fast_forward_drafts": (None, (False, True), (1,)),
    "draft_masks": (False, (True,), (1, None)),
    "threads": (None, (1, 1024), (0, 1025)),
    "queue_limit": (256, (1,), (0,)),
    "grammar_timeout_s": (10.0, (0.001,), (0.0, inf)),
    "fill_timeout_s": (0.1, (0.001,), (0.0, inf)),
    "max_grammar_bytes": (1 << 18, (1,), (0, 1.0, True)),
    "max_prompt_bytes": (None, (1,), (0, 1.0)),
    "prompt_timeout_s": (10.0, (0.001,), (0.0, inf)),
    "max_images": (16, (1,), (0, 1.0)),
    "max_image_bytes": (20 << 20, (1,), (0, 1.0)),
    "max_image_pixels": (50_000_000, (1,), (0, 1.0)),
    "max_image_memory": (2 << 30, (1,), (0, 1.0)),
    "allowed_media_domains": (None, ("a.org",), (1,)),
    "chat_template": (None, ("file",), (1,)),
    "generation_config": (True, (False,), (0,)),
    "cache_tokens": (None, (1,), (0, 1.0)),
    "prefix_caching": (True, (False,), (0,)),
    "prefill_chunk": (None, (1,), (0, 1.0)),
    "synthetic_rule": (False, (True,), (1,)),
    "cuda_graphs": (True, (False,), (0,)),
    "profile": (False, (True,), (1,)),
}


@pytest.mark.parametrize(
    ("kind", "name", "accepted", "refused"),
    [
        (kind, name, accepted, refused)
        for kind, table in ((SamplingParams, PARAMETERS), (RuntimeOptions, OPTIONS))
        for name, (_, accepted, refused) in table.items()
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_at_a_bound_are_accepted_and_the_next_ones_refused(
    kind: Any, name: str, accepted: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    for value in accepted:
        kind(**{name: value})
    for value in refused:
        with pytest.raises(BadRequest, match=name):
            kind(**{name: value})


@pytest.mark.parametrize(("kind", "table"), [(SamplingParams, PARAMETERS), (RuntimeOptions, OPTIONS)])
def test_every_parameter_and_option_has_its_documented_default(kind: Any, table: dict[str, tuple[Any, ...]]) -> None:
    assert {name: field.default for name, field in kind.model_fields.items()} == {
        name: default for name, (default, *_) in table.items()
    }


@pytest.mark.parametrize(
    ("values", "valid"),
    [
        ({"rule": "synthetic", "synthetic_acceptance_length": 1}, True),
        ({"rule": "synthetic", "synthetic_acceptance_length": 17}, True),
        ({"rule": "synthetic", "synthetic_acceptance_length": 0.999}, False),
        ({"rule": "synthetic", "synthetic_acceptance_length": 17.001}, False),
        ({"rule": "synthetic", "synthetic_acceptance_length": 2, "logprobs": 0}, False),
        ({"rule": "synthetic", "synthetic_acceptance_length": 2, "prompt_logprobs": 0}, True),
        ({"rule": "synthetic", "synthetic_acceptance_length": 2, "draft_sampling": "coupled"}, True),
        ({"rule": "rejection", "draft_sampling": "probabilistic"}, True),
        ({"rule": "rejection", "draft_sampling": "greedy"}, True),
        ({"rule": "rejection", "draft_sampling": "coupled"}, False),
        ({"draft_sampling": "greedy", "draft_greedy_below": 1}, True),
        ({"draft_sampling": "greedy", "draft_temperature_scale": 1}, False),
        ({"draft_sampling": "coupled", "draft_temperature_scale": 1}, True),
        ({"min_tokens": 4, "max_tokens": 4}, True),
        ({"min_tokens": 5, "max_tokens": 4}, False),
        ({"allowed_token_ids": [1, 2], "banned_token_ids": [1]}, True),
        ({"allowed_token_ids": [1, 2], "banned_token_ids": [2, 1, 3]}, False),
        ({"logit_bias": {"1": 1, 2: 1}}, True),
        ({"logit_bias": {"1": 1, 1: 1}}, False),
    ],
    ids=str,
)
def test_parameters_are_refused_together_exactly_if_they_contradict(values: dict[str, Any], valid: bool) -> None:
    if valid:
        SamplingParams(**values)
        return
    with pytest.raises(BadRequest):
        SamplingParams(**values)


MODEL = {"kind": "model", "checkpoint": "d", "num_draft_tokens": 4}
HEAD = MODEL | {"kind": "eagle3"}
ENDS = {"think_start": "a", "think_ends": ["b"], "forced_end": "c"}
TARGET = {"batch": 2, "length": 100, "capacity": 128, "num_draft_tokens": 20, "prefill_chunk": 100}
DELIMITER = {"text": "a", "ids": (0,)}
READ = {"think_start": DELIMITER, "think_ends": (DELIMITER,), "forced_end": DELIMITER}


@pytest.mark.parametrize(
    ("kind", "values", "name", "accepted", "refused"),
    [
        (RecipeLimits, {}, "batch", [1], [0]),
        (RecipeLimits, {}, "length", [2], [1]),
        (RecipeLimits, {}, "prefill_chunk", [1], [0]),
        (RecipeLimits, {}, "cache_tokens", [1], [0]),
        *(
            (kind, values, name, accepted, refused)
            for kind, values in ((ModelDraft, MODEL), (HeadDraft, HEAD))
            for name, accepted, refused in (
                ("num_draft_tokens", [1, 16], [0, 17]),
                ("greedy_below", [0.0, 100.0], [-0.1, 100.1]),
                ("temperature_scale", [0.01, 10.0], [0.009, 10.1]),
            )
        ),
        (NgramDraft, {"kind": "ngram"}, "num_draft_tokens", [1, 16], [0, 17]),
        (NgramDraft, {"kind": "ngram"}, "ngram_min", [1, 4], [0, 5]),
        (NgramDraft, {"kind": "ngram"}, "ngram_max", [2, 99], [0, 1]),
        (NoDraft, {"kind": "none"}, "num_draft_tokens", [0, 16], [-1, 17]),
        *((Reasoning, ENDS, name, ["a" * 4096], ["", "a" * 4097]) for name in ("think_start", "forced_end")),
        (Reasoning, ENDS, "think_ends", [["a"] * 64], [[], ["a"] * 65, [""]]),
        (Reasoning, ENDS, "implicit_ends", [[], ["a"] * 64], [["a"] * 65, [""]]),
        (OnnxRuntimeCuda, {"name": "onnxruntime-cuda"}, "tensor_parallel", [1, 2, 4, 8], [0, 3, 16]),
        (OnnxRuntimeCuda, {"name": "onnxruntime-cuda"}, "compute_capabilities", [["9.0"]], [[], ["9.0"] * 2, ["9.1"]]),
        (TensorRt, {"name": "tensorrt"}, "workspace_mib", [1], [0]),
        (TensorRt, {"name": "tensorrt"}, "optimization_level", [0, 5], [-1, 6]),
        (TensorRt, {"name": "tensorrt"}, "python", ["a"], [""]),
        (TensorRt, {"name": "tensorrt", "python": "a", "version_compatible": True}, "headers", ["a"], [""]),
        (TensorRt, {"name": "tensorrt", "python": "a", "headers": "a"}, "version_compatible", [True], [False]),
        (TensorRt, {"name": "tensorrt", "version_compatible": True, "headers": "a"}, "python", ["a"], [None]),
        *((Limits, TARGET, name, [100], [0]) for name in ("prefill_chunk", "length")),
        (Limits, TARGET, "batch", [1], [0]),
        (Limits, TARGET, "num_draft_tokens", [0, 27], [-1, 28]),
        (ReasoningDelimiters, READ, "think_ends", [(DELIMITER,) * 64], [(), (DELIMITER,) * 65]),
        (ReasoningDelimiters, READ, "implicit_ends", [(), (DELIMITER,) * 64], [(DELIMITER,) * 65]),
        (ReasoningDelimiters, READ, "think_start", [{"text": "a", "ids": (0, 1)}], [{"text": "a", "ids": ()}]),
        (ReasoningDelimiters, READ, "forced_end", [{"text": "a", "ids": (0,)}], [{"text": "a", "ids": (-1,)}]),
    ],
    ids=str,
)
def test_keys_of_recipes_and_manifests_hold_at_exactly_their_bounds(
    kind: Any, values: dict[str, Any], name: str, accepted: list[Any], refused: list[Any]
) -> None:
    for value in accepted:
        kind(**(values | {name: value}))
    for value in refused:
        with pytest.raises(ValidationError):
            kind(**(values | {name: value}))


# Default, least, most; without bounds: default alone.
SERVER: dict[str, tuple[Any, ...]] = {
    "host": ("127.0.0.1",),
    "port": (8000, 0, 65535),
    "api_key": (None,),
    "metrics_without_key": (False,),
    "dashboard_texts": (False,),
    "allowed_origins": (None,),
    "ssl_certfile": (None,),
    "ssl_keyfile": (None,),
    "max_body": (4 << 20, 1, None),
    "max_bodies": (None, 1, None),
    "max_answer": (16 << 20, 1, None),
    "max_connections": (None, 1, None),
    "max_connections_per_address": (None, 1, None),
    "header_timeout_s": (30.0, 0.1, None),
    "body_timeout_s": (30.0, 0.1, None),
    "write_timeout_s": (30.0, 0.1, None),
    "allowed_hosts": (None,),
    "trusted_proxies": ((),),
    "salt_cache_by": (None,),
    "grace_s": (None, 0, None),
    "batch_folder": (None,),
    "batch_bytes": (4 << 30, 1, None),
    "log_level": ("info",),
    "otlp_traces_endpoint": (None,),
}


def test_every_option_of_a_server_has_its_default_and_its_bounds() -> None:
    hints = get_type_hints(ServerConfig, include_extras=True)

    def bounds(name: str) -> tuple[Any, ...]:
        option = hints[name].__metadata__[0]
        return () if option.min is option.max is None else (option.min, option.max)

    assert {each.name: (each.default, *bounds(each.name)) for each in fields(ServerConfig)} == SERVER


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"max_body": 8, "max_bodies": 16}, None),
        ({"max_body": 8, "max_bodies": 15}, "max_bodies"),
        ({"max_connections": 4, "max_connections_per_address": 4}, None),
        ({"max_connections": 4, "max_connections_per_address": 5}, "max_connections_per_address"),
        ({"max_connections": 1}, None),
        ({"max_connections": 0}, "max_connections_per_address"),
        ({"api_key": "a b"}, None),
        ({"api_key": " a"}, "api_key"),
        ({"api_key": "a "}, "api_key"),
        ({"api_key": ""}, "api_key"),
        ({"api_key": "a\x1fb"}, "api_key"),
        ({"api_key": "a\x7f"}, "api_key"),
        ({"api_key": "é"}, None),
        ({"api_key": "\udcff"}, "api_key"),
        ({"trusted_proxies": ("10.0.0.1", "10.0.0.0/8", "::1")}, None),
        ({"trusted_proxies": ("10.0.0.1", "proxy")}, "trusted_proxies"),
        ({"allowed_origins": ["*", "https://a.org:8080"]}, None),
        ({"allowed_origins": ["https://a.org", "a.org"]}, "allowed_origins"),
        ({"allowed_origins": ["https://a.org/"]}, "allowed_origins"),
    ],
    ids=str,
)
def test_options_of_a_server_are_refused_exactly_if_they_break_a_rule(
    values: dict[str, Any], refused: str | None
) -> None:
    if refused is None:
        ServerConfig(**values)
        return
    with pytest.raises(BadRequest, match=f"^{refused}: "):
        ServerConfig(**values)


def test_limits_of_a_server_follow_from_each_other() -> None:
    server = ServerConfig(max_body=8, max_connections=7)
    assert (server.bodies_limit, server.connections_limit, server.address_limit) == (128, 7, 1)
    assert ServerConfig().connections_limit == 4096
    assert ServerConfig(max_connections=3).address_limit == 1
