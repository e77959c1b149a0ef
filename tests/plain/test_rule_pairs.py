"""Rules over several values of a recipe, an option or a parameter: the last valid combination and its neighbour."""

import re
from typing import Any

import pytest
from pydantic import BaseModel

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.recipe.tensorrt import TensorRt
from tests.plain.test_rules import refusal

CPU, CUDA, LINEAR = (
    {"name": "onnxruntime-cpu"},
    {"name": "onnxruntime-cuda"},
    {"name": "onnxruntime-cuda", "cache": "linear"},
)
TENSORRT = {"name": "tensorrt"}
PLUGINS = TENSORRT | {"headers": "h", "python": "p", "version_compatible": True}


def recipe(dtype: str = "float32", backend: dict[str, Any] = CPU, **sections: Any) -> dict[str, Any]:
    target = {"checkpoint": "c", "dtype": dtype} | sections.pop("target", {})
    return {"name": "r", "target": target, "backend": backend, **sections}


def drafted(kind: str, **values: Any) -> dict[str, Any]:
    return {"draft": {"kind": kind, "checkpoint": "d"} | values}


def rtx(*capabilities: str) -> dict[str, Any]:
    return {"name": "tensorrt-rtx", "compute_capabilities": capabilities}


NONE = {"kind": "none", "num_draft_tokens": 7}
BOUND = {"batch": 2, "length": 32}

# (record, valid values, invalid neighbour, rule)
COMBINATIONS: list[tuple[type[BaseModel], dict[str, Any], dict[str, Any], str]] = [
    (
        Recipe,
        recipe(limits={"length": 8}, draft=NONE),
        recipe(limits={"length": 7}, draft=NONE),
        "draft.num_draft_tokens must be below limits.length; got 7 >= 7",
    ),
    (
        Recipe,
        recipe(limits=BOUND | {"prefill_chunk": 32}),
        recipe(limits=BOUND | {"prefill_chunk": 33}),
        "limits.prefill_chunk must not exceed length; got 33 > 32",
    ),
    (
        Recipe,
        recipe(backend=CUDA, limits=BOUND | {"prefill_chunk": 64}),
        recipe(backend=CUDA, limits=BOUND | {"prefill_chunk": 65}),
        r"limits.prefill_chunk must not exceed batch \* length; got 65 > 64",
    ),
    (
        Recipe,
        recipe(backend=CUDA, limits={"cache_tokens": 4096}),
        recipe(backend=LINEAR, limits={"cache_tokens": 4096}),
        "limits.cache_tokens needs .* cache = 'paged'; got 4096 for a linear cache",
    ),
    (
        Recipe,
        recipe(backend=CUDA, limits={"length": 100, "cache_tokens": 105}),
        recipe(backend=CUDA, limits={"length": 100, "cache_tokens": 104}),
        r"limits.cache_tokens must hold one request: .* = 105; got 104",
    ),
    *(
        (Recipe, recipe(backend=CUDA | option), recipe(backend=LINEAR | option), f"backend.{name} needs .* 'paged'")
        for name, option in {
            "batch_invariant": {"batch_invariant": True},
            "tensor_parallel": {"tensor_parallel": 2},
        }.items()
    ),
    *(
        (
            Recipe,
            recipe("int4", good),
            recipe("int4", bad),
            "dtype must be float32, float16 or bfloat16 unless .* 'int4'",
        )
        for good, bad in ((CPU, LINEAR), (CUDA, LINEAR), (CUDA, TENSORRT), (CPU, rtx("8.6")))
    ),
    (
        Recipe,
        recipe("float16", LINEAR, **drafted("model", dtype="float32")),
        recipe("float16", LINEAR, **drafted("model", dtype="int8")),
        "dtype must be float32, float16 or bfloat16 unless .* 'int8'",
    ),
    *(
        (
            Recipe,
            recipe(**{section: values | {"dtype": "float16", "dequantize": True}}),
            recipe(**{section: values | {"dtype": "int8", "dequantize": True}}),
            f"{section}.dequantize needs {section}.dtype float32, float16 or bfloat16, .* 'int8'",
        )
        for section, values in (("target", {}), ("draft", drafted("model")["draft"]))
    ),
    *(
        (
            Recipe,
            recipe("float16", CUDA, **{section: values | {"kv_dtype": kv_dtype}}),
            recipe("float16", backend, **{section: values | {"kv_dtype": other}}),
            f"{section}.kv_dtype {rule}",
        )
        for section, values in (("target", {}), ("draft", drafted("model")["draft"]))
        for kv_dtype, backend, other, rule in (
            ("float8_e4m3", LINEAR, "float8_e4m3", "'float8_e4m3' needs .*'onnxruntime-cuda' with cache = 'paged'"),
            ("float16", CUDA, "float32", "must be float8_e4m3 or the compute dtype 'float16'; got 'float32'"),
        )
    ),
    *(
        (Recipe, recipe(*valid[:2], **valid[2]), recipe(*invalid[:2], **invalid[2]), "has no bfloat16 kernels")
        for valid, invalid in (
            (("float16", CPU, {}), ("bfloat16", CPU, {})),
            (("bfloat16", CUDA, {}), ("bfloat16", CPU, {})),
            (("float16", CPU, drafted("pard", dtype="float16")), ("float16", CPU, drafted("pard", dtype="bfloat16"))),
        )
    ),
    (
        Recipe,
        recipe("bfloat16", rtx("8.0")),
        recipe("bfloat16", rtx("8.0", "7.5")),
        "dtype must be float16 for compute capability 7.5",
    ),
    (Recipe, recipe("float16", rtx("7.5")), recipe("bfloat16", rtx("7.5")), "dtype must be float16 for compute cap"),
    (
        Recipe,
        recipe("float16", rtx("7.5"), **drafted("model")),
        recipe("float16", rtx("7.5"), **drafted("model", dtype="bfloat16")),
        "dtype must be float16 for compute capability 7.5",
    ),
    (
        Recipe,
        recipe(backend=rtx("8.6", "8.9"), dtype="float16"),
        recipe(backend=rtx("8.6", "8.6")),
        "each capability once",
    ),
    (
        Recipe,
        recipe(backend=CUDA | {"compute_capabilities": ("8.0", "9.0")}),
        recipe(backend=CUDA | {"compute_capabilities": ("9.0", "9.0")}),
        "each capability once",
    ),
    (
        Recipe,
        recipe("float16", TENSORRT, **drafted("mtp")),
        recipe("float16", TENSORRT, **drafted("dspark")),
        "draft.kind must be one of model, .*; got 'dspark'",
    ),
    *(
        (
            Recipe,
            recipe("float32", TENSORRT | {"layers": "basic"}, **draft),
            recipe(dtype, TENSORRT, **other),
            "dtype must be float16 or bfloat16 when backend.name is 'tensorrt', .*; got 'float32'",
        )
        for dtype, draft, other in (
            ("float32", {}, {}),
            ("float16", drafted("model"), drafted("model", dtype="float32")),
        )
    ),
    *(
        (TensorRt, PLUGINS, PLUGINS | other, "headers needs python, .* and version_compatible = true")
        for other in ({"python": None}, {"version_compatible": False})
    ),
    (
        SamplingParams,
        {"min_tokens": 4, "max_tokens": 4},
        {"min_tokens": 5, "max_tokens": 4},
        "min_tokens must be at most",
    ),
    (
        SamplingParams,
        {"truncate_prompt_tokens": 1},
        {"truncate_prompt_tokens": 0},
        "truncate_prompt_tokens must be -1 or at least 1",
    ),
    (
        SamplingParams,
        {"draft_sampling": "coupled", "draft_temperature_scale": 0.5},
        {"draft_sampling": "greedy", "draft_temperature_scale": 0.5},
        "draft_temperature_scale must not be set with draft_sampling greedy",
    ),
    (
        SamplingParams,
        {"rule": "synthetic", "synthetic_acceptance_length": 2},
        {"rule": "synthetic"},
        "synthetic_acceptance_length must come with the rule synthetic",
    ),
    (
        SamplingParams,
        {"rule": "synthetic", "synthetic_acceptance_length": 2},
        {"synthetic_acceptance_length": 2},
        "synthetic_acceptance_length must come with the rule synthetic",
    ),
    (
        SamplingParams,
        {"rule": "synthetic", "synthetic_acceptance_length": 2, "prompt_logprobs": 0},
        {"rule": "synthetic", "synthetic_acceptance_length": 2, "logprobs": 0},
        "logprobs must not be set under the rule synthetic",
    ),
    (
        SamplingParams,
        {"allowed_token_ids": [1, 2], "banned_token_ids": [1]},
        {"allowed_token_ids": [1], "banned_token_ids": [2, 1]},
        "allowed_token_ids must have a token that is not in banned_token_ids",
    ),
    (
        SamplingParams,
        {"stop": ["a" * 8000, "b" * 192]},
        {"stop": ["a" * 8000, "b" * 193]},
        "must have at most 8192 characters in all; got 8193",
    ),
    (
        SamplingParams,
        {"logit_bias": dict.fromkeys(range(1024), 0)},
        {"logit_bias": dict.fromkeys(range(1025), 0)},
        "must have at most 1024 tokens; got 1025",
    ),
    *(
        (
            SamplingParams,
            {name: [1] * (1 << 18)},
            {name: [1] * ((1 << 18) + 1)},
            f"{name}: must have at most 262144 token ids; got 262145",
        )
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids")
    ),
    (StructuredOutputs, {"json": {}}, {"json": {}, "regex": "a"}, "exactly one of .* got json and regex"),
    (StructuredOutputs, {"choice": ["a"]}, {}, "exactly one of .* got none"),
    (StructuredOutputs, {"json_object": True}, {"json_object": False}, "json_object must be True, got False"),
    (StructuredOutputs, {"choice": ["a"]}, {"choice": []}, "choice must be a non-empty list"),
    *(
        (StructuredOutputs, {"json": {}, **option}, {"regex": "a", **option}, rule)
        for option, rule in (
            ({"validate_output": True}, "validate_output must come with json, got regex"),
            ({"whitespace": "any"}, "whitespace must come with json, json_object or structural_tag, got regex"),
            ({"disable_additional_properties": False}, "disable_additional_properties=False must come with json"),
        )
    ),
    (RuntimeOptions, {"num_draft_tokens": {1: 4, 9: 0}}, {"num_draft_tokens": {2: 4, 9: 0}}, "1 among them"),
    (RuntimeOptions, {"num_draft_tokens": {1: 4, 2: 0}}, {"num_draft_tokens": {1: 4, 0: 0}}, "a table must map"),
    (RuntimeOptions, {"num_draft_tokens": {1: 4, 9: 0}}, {"num_draft_tokens": {1: 4, 9: -1}}, "must be 0 or more"),
    (RuntimeOptions, {"device": "cuda:99"}, {"device": "cuda:100"}, "device: must be 'cpu', 'cuda' or 'cuda:N'"),
    (RuntimeOptions, {"device": "cpu:0"}, {"device": "cpu:1"}, "device: must be 'cpu', 'cuda' or 'cuda:N'"),
]


@pytest.mark.parametrize(("record", "valid", "invalid", "rule"), COMBINATIONS)
def test_a_combination_is_accepted_and_its_neighbour_is_rejected(
    record: type[BaseModel], valid: dict[str, Any], invalid: dict[str, Any], rule: str
) -> None:
    assert refusal(record, valid) == ""
    assert re.search(rule, refusal(record, invalid))
