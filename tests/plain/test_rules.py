"""Rules of recipes, options, parameters and manifests: the last valid value is accepted, its neighbour is rejected.

The tables are written by hand. A test compares them with the rules that the records declare, so a new rule needs a row.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from tandemrt.engines.bundle.manifest import Delimiter, File, Limits, ReasoningDelimiters, SharedWeight
from tandemrt.engines.contract.draft_kinds import (
    BlockEntry,
    Eagle3Entry,
    HeadKind,
    ModelEntry,
    ModelKind,
    MtpEntry,
    NgramEntry,
    PardEntry,
    PEagleEntry,
)
from tandemrt.engines.options.deployment import Deployment
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.engines.recipe import models
from tandemrt.engines.recipe.backends import OnnxRuntimeCuda
from tandemrt.engines.recipe.recipe import Reasoning, RecipeLimits
from tandemrt.engines.recipe.tensorrt import TensorRt, TensorRtRtx
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.engines.validation.records import explain

TINY, HUGE = 2.0**-126, 2.0**126
COUNT, MANY = (0, 2**63 - 1), (1, None)
POSITIVE = (5e-324, None)  # the smallest float
SCALE, GREEDY, DRAFTED = (0.01, 10.0), (0.0, 100.0), (1, 16)
MARK = {"text": "a", "ids": (1,)}
MARKS = {"think_start": MARK, "think_ends": (MARK,), "forced_end": MARK}
TEXTS = {"think_start": "a", "think_ends": ["a"], "forced_end": "a"}
SIZES = {"batch": 4, "length": 4, "capacity": 9, "num_draft_tokens": 4, "prefill_chunk": 4}
WEIGHT = {"file": "f", "offset": 0, "dtype": "float32", "shape": (1,)}
SAMPLED = {"greedy_below": GREEDY, "temperature_scale": SCALE}
BLOCK = {"mask_token": 0, "block": 8}


def one_text(length: int) -> list[str]:
    return ["a" * length]


def text(length: int) -> str:
    return "a" * length


def texts(length: int) -> list[str]:
    return ["a"] * length


def item(number: int) -> list[int]:
    return [number]


def items(length: int) -> tuple[Any, ...]:
    return (MARK,) * length


def gpus(length: int) -> list[str]:
    return ["8.6", "8.9"][:length]


IGNORED = {"ignore_config_fields": (one_text, 1, None)}

# (record, values that it needs besides): field -> (least, most), or (how a number becomes a value, least, most)
BOUNDS: list[tuple[type[BaseModel], dict[str, Any], dict[str, tuple[Any, ...]]]] = [
    (
        SamplingParams,
        {},
        {
            "temperature": (0.0, 100.0),
            "top_p": (TINY, 1.0),
            "top_k": (-1, 2**63 - 1),
            "min_p": (0.0, 1.0),
            "top_n_sigma": (0.0, 100.0),
            "seed": (-(2**63), 2**64 - 1),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
            "repetition_penalty": (TINY, HUGE),
            "logit_bias": (lambda bias: {7: bias}, -100.0, 100.0),
            "max_tokens": (1, 2**63 - 1),
            "min_tokens": COUNT,
            "stop": (texts, None, 256),
            "stop_token_ids": (item, *COUNT),
            "allowed_token_ids": (item, *COUNT),
            "banned_token_ids": (item, *COUNT),
            "bad_words": (one_text, 1, 8192),
            "thinking_token_budget": (-1, 2**63 - 1),
            "logprobs": (0, 20),
            "prompt_logprobs": (0, 20),
            "n": (1, 128),
            "truncate_prompt_tokens": (-1, 2**63 - 1),
            "priority": (-(2**31), 2**31 - 1),
            "cache_salt": (text, 1, None),
            "draft_greedy_below": GREEDY,
            "draft_temperature_scale": SCALE,
            "num_draft_tokens": COUNT,
            "timeout_s": (5e-324, sys.float_info.max),
        },
    ),
    (SamplingParams, {"rule": "synthetic"}, {"synthetic_acceptance_length": (1.0, 17.0)}),
    (
        StructuredOutputs,
        {},
        {"regex": (text, 1, None), "choice": (one_text, 1, None), "grammar": (text, 1, None)},
    ),
    (
        RuntimeOptions,
        {},
        {
            "num_draft_tokens": (0, None),
            "threads": (1, 1024),
            "queue_limit": MANY,
            "grammar_timeout_s": POSITIVE,
            "fill_timeout_s": POSITIVE,
            "prompt_timeout_s": POSITIVE,
            "max_grammar_bytes": MANY,
            "max_prompt_bytes": MANY,
            "max_images": MANY,
            "max_image_pixels": MANY,
            "max_image_memory": MANY,
            "cache_tokens": MANY,
            "prefill_chunk": MANY,
        },
    ),
    (Deployment, {"tandemrt_version": "1"}, {"bundle": (text, 1, None)}),
    (
        RecipeLimits,
        {},
        {"batch": MANY, "length": (2, None), "prefill_chunk": MANY, "cache_tokens": MANY},
    ),
    (
        Reasoning,
        TEXTS,
        {
            "think_start": (text, 1, 4096),
            "think_ends": (texts, 1, 64),
            "forced_end": (text, 1, 4096),
            "implicit_ends": (texts, None, 64),
        },
    ),
    (models.Target, {"checkpoint": "c"}, IGNORED),
    *(
        (draft, {"kind": kind, "checkpoint": "c"}, {"num_draft_tokens": DRAFTED, **SAMPLED, **IGNORED})
        for draft, kinds in {models.ModelDraft: ModelKind, models.HeadDraft: HeadKind}.items()
        for kind in get_args(kinds)
    ),
    (models.ModelDraft, {"kind": "model", "checkpoint": "c", "num_draft_tokens": 4}, {"vocab": MANY}),
    (models.NgramDraft, {"kind": "ngram"}, {"num_draft_tokens": DRAFTED, "ngram_min": (1, 4), "ngram_max": (2, None)}),
    (models.NgramDraft, {"kind": "ngram", "ngram_min": 1}, {"ngram_max": MANY}),
    (models.NoDraft, {"kind": "none"}, {"num_draft_tokens": (0, 16)}),
    (
        TensorRt,
        {"name": "tensorrt"},
        {"python": (text, 1, None), "workspace_mib": MANY, "optimization_level": (0, 5)},
    ),
    (TensorRt, {"name": "tensorrt", "python": "p", "version_compatible": True}, {"headers": (text, 1, None)}),
    (TensorRtRtx, {"name": "tensorrt-rtx"}, {"compute_capabilities": (gpus, 1, None)}),
    (OnnxRuntimeCuda, {"name": "onnxruntime-cuda"}, {"compute_capabilities": (gpus, 1, None)}),
    (Limits, SIZES, {"batch": MANY, "prefill_chunk": (1, 4), "num_draft_tokens": (0, 4)}),
    (Limits, SIZES | {"prefill_chunk": 1}, {"length": (1, 4), "capacity": (9, None)}),
    (Limits, SIZES | {"capacity": 64}, {"cache_blocks": MANY}),
    (Delimiter, MARK, {"text": (text, 1, 4096), "ids": (lambda token: (token,), 0, None)}),
    (Delimiter, MARK, {"ids": (lambda length: (1,) * length, 1, None)}),
    (ReasoningDelimiters, MARKS, {"think_ends": (items, 1, 64), "implicit_ends": (items, None, 64)}),
    (SharedWeight, WEIGHT, {"offset": (0, None), "shape": (lambda size: (size,), 1, None)}),
    (File, {"sha256": "0" * 64, "size": 1}, {"size": (0, None), "sha256": (lambda n: "f" * n, 64, 64)}),
    (NgramEntry, {"kind": "ngram", "ngram_max": 4}, {"ngram_min": (1, 4)}),
    (NgramEntry, {"kind": "ngram", "ngram_min": 1}, {"ngram_max": MANY}),
    (ModelEntry, {"kind": "model"}, {"vocab": MANY, **SAMPLED}),
    (PardEntry, {"kind": "pard"}, {"mask_token": (0, None)}),
    (PardEntry, {"kind": "pard", "mask_token": 0}, {"vocab": MANY, **SAMPLED}),
    (Eagle3Entry, {"kind": "eagle3"}, {"vocab": MANY, **SAMPLED}),
    (PEagleEntry, {"kind": "peagle"}, {"mask_token": (0, None)}),
    (PEagleEntry, {"kind": "peagle", "mask_token": 0}, {"vocab": MANY, **SAMPLED}),
    (MtpEntry, {"kind": "mtp"}, {"layers": (2, 4), "vocab": MANY, **SAMPLED}),
    *(
        (BlockEntry, {"kind": kind, **BLOCK}, {"block": (2, 17), "mask_token": (0, None), "vocab": MANY, **SAMPLED})
        for kind in ("dflash", "dflash2", "dspark")
    ),
]

# Fields with a closed list of values, in full. "x" stands for any other.
CHOICES: list[tuple[type[BaseModel], dict[str, Any], dict[str, tuple[Any, ...]]]] = [
    (
        SamplingParams,
        {},
        {"logprobs_mode": ("processed", "raw"), "draft_sampling": ("greedy", "coupled")},
    ),
    (SamplingParams, {}, {"rule": ("coupled", "rejection")}),
    (SamplingParams, {"synthetic_acceptance_length": 2.0}, {"rule": ("synthetic",)}),
    (SamplingParams, {"rule": "rejection"}, {"draft_sampling": ("greedy", "probabilistic")}),
    (StructuredOutputs, {"json": {}}, {"whitespace": ("compact", "bounded", "any")}),
    (StructuredOutputs, {"json": {}}, {"engine": ("llguidance", "xgrammar")}),
    *(
        (
            section,
            {"checkpoint": "c", **kind},
            {
                "dtype": ("float32", "float16", "bfloat16", "int8", "int4"),
                "kv_dtype": ("float8_e4m3", "float32", "float16", "bfloat16"),
            },
        )
        for section, kind in ((models.Target, {}), (models.ModelDraft, {"kind": "model"}))
    ),
    (models.ModelDraft, {"checkpoint": "c", "kind": "model"}, {"sampling": ("greedy",)}),
    (models.ModelDraft, {"checkpoint": "c"}, {"kind": get_args(ModelKind)}),
    (models.HeadDraft, {"checkpoint": "c"}, {"kind": get_args(HeadKind)}),
    (BlockEntry, BLOCK, {"kind": ("dflash", "dflash2", "dspark")}),
    (TensorRt, {"name": "tensorrt"}, {"layers": ("native", "basic")}),
    (
        TensorRt,
        {"name": "tensorrt"},
        {"hardware_compatibility": ("none", "same_compute_capability", "ampere_plus")},
    ),
    (OnnxRuntimeCuda, {"name": "onnxruntime-cuda"}, {"cache": ("linear", "paged"), "tensor_parallel": (1, 2, 4, 8)}),
    (
        OnnxRuntimeCuda,
        {"name": "onnxruntime-cuda"},
        {"compute_capabilities": (["8.0"], ["8.6"], ["8.9"], ["9.0"], ["10.0"], ["12.0"])},
    ),
    (
        TensorRtRtx,
        {"name": "tensorrt-rtx"},
        {"compute_capabilities": (["7.5"], ["8.0"], ["8.6"], ["8.9"], ["12.0"], ["12.1"])},
    ),
]


# Fields whose default is neither None, False, 0 nor empty.
DEFAULTS: dict[type[BaseModel], dict[str, Any]] = {
    SamplingParams: {
        "temperature": 1.0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": True,
        "logprobs_mode": "processed",
        "n": 1,
        "rule": "coupled",
    },
    StructuredOutputs: {"whitespace": "bounded", "disable_additional_properties": True},
    RuntimeOptions: {
        "queue_limit": 256,
        "grammar_timeout_s": 10.0,
        "fill_timeout_s": 0.1,
        "max_grammar_bytes": 256 << 10,
        "prompt_timeout_s": 10.0,
        "max_images": 16,
        "max_image_bytes": 20 << 20,
        "max_image_pixels": 50_000_000,
        "max_image_memory": 2 << 30,
        "generation_config": True,
        "prefix_caching": True,
        "cuda_graphs": True,
    },
    RecipeLimits: {"batch": 8, "length": 2048},
    Reasoning: {},
    models.Target: {"dtype": "float32"},
    models.ModelDraft: {"temperature_scale": 1.0},
    models.HeadDraft: {"temperature_scale": 1.0},
    models.NgramDraft: {"num_draft_tokens": 4, "ngram_min": 2, "ngram_max": 4},
    models.NoDraft: {"num_draft_tokens": 4},
    OnnxRuntimeCuda: {
        "cache": "paged",
        "tensor_parallel": 1,
        "compute_capabilities": ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0"),
    },
    TensorRt: {"layers": "native", "hardware_compatibility": "none", "optimization_level": 3},
    TensorRtRtx: {},
}


def refusal(record: type[BaseModel], values: dict[str, Any]) -> str:
    """Return the error for ``values``, "" if they are accepted."""
    try:
        record(**values)
    except BadRequest as error:
        return str(error)
    except ValidationError as error:
        return explain(error)
    return ""


def outside(number: float, direction: int) -> float:
    """Return the neighbour of ``number`` in a direction."""
    return number + direction if isinstance(number, int) else math.nextafter(number, direction * math.inf)


def bounds() -> Iterator[Any]:
    for record, needed, fields in BOUNDS:
        for field, (*how, least, most) in fields.items():
            build: Callable[[Any], Any] = how[0] if how else lambda number: number
            for bound, direction in ((least, -1), (most, 1)):
                if bound is not None:
                    valid, invalid = (needed | {field: build(n)} for n in (bound, outside(bound, direction)))
                    name = f"{record.__name__}.{field} {'at least' if direction < 0 else 'at most'} {bound}"
                    yield pytest.param(record, field, valid, invalid, id=name)


@pytest.mark.parametrize(("record", "field", "valid", "invalid"), list(bounds()))
def test_a_bound_is_accepted_and_its_neighbour_is_rejected(
    record: type[BaseModel], field: str, valid: dict[str, Any], invalid: dict[str, Any]
) -> None:
    assert refusal(record, valid) == ""
    message = refusal(record, invalid)
    assert message.count("\n") == 0
    assert re.search(rf"\b{field}\b.* must ", message) or re.search(rf" must .*\b{field}\b", message)


@pytest.mark.parametrize(
    ("record", "needed", "field", "values"),
    [(record, needed, field, values) for record, needed, fields in CHOICES for field, values in fields.items()],
)
def test_every_choice_is_accepted_and_no_other(
    record: type[BaseModel], needed: dict[str, Any], field: str, values: tuple[Any, ...]
) -> None:
    for value in values:
        assert refusal(record, needed | {field: value}) == ""
    listed = isinstance(values[0], list)
    first = values[0][0] if listed else values[0]
    for other in (f"{first}x", str(first)[:-1], 3):
        message = refusal(record, needed | {field: [other] if listed else other})
        assert f"{field}{'.0' if listed else ''}: must be " in message


@pytest.mark.parametrize("record", DEFAULTS)
def test_a_field_that_is_left_out_has_this_default(record: type[BaseModel]) -> None:
    defaults = {name: rule.get_default() for name, rule in record.model_fields.items() if not rule.is_required()}
    assert {name: value for name, value in defaults.items() if value} == DEFAULTS[record]


LIMITS = {
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
}


def keys_of(rule: Any) -> set[str]:
    """Return the keys of a JSON schema and of its parts."""
    parts = rule.values() if isinstance(rule, dict) else rule if isinstance(rule, list) else ()
    return set(rule if isinstance(rule, dict) else ()).union(*map(keys_of, parts))


@pytest.mark.parametrize(("table", "keys"), [(BOUNDS, LIMITS), (CHOICES, {"enum"})], ids=["bounds", "choices"])
def test_every_rule_of_a_record_is_in_the_tables(table: Any, keys: set[str]) -> None:
    for record in {record for record, _, _ in table}:
        listed = {field for other, _, fields in table if issubclass(record, other) for field in fields}
        rules = record.model_json_schema()["properties"]
        ruled = {field for field, rule in rules.items() if keys_of(rule) & keys}
        assert ruled <= listed, record.__name__


@pytest.mark.parametrize("digest", ["0" * 63 + "g", "F" * 64, "0" * 64 + "\n"])
def test_a_digest_has_64_hexadecimal_digits(digest: str) -> None:
    assert "sha256: must match" in refusal(File, {"sha256": digest, "size": 1})
