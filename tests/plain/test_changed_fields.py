"""What readers make of every changed field: of configs, recipes, manifests and requests. Each answer was recorded."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandemrt import SamplingParams
from tandemrt.engines.bundle.manifest import DIGEST, Manifest, _digest
from tandemrt.engines.contract.sampling_parameters import SAMPLING_PARAMETERS
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.parameters.generation_config import FILE_NAME, recommended
from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.recipe.recipe import INCLUDED, Recipe
from tandemrt.engines.validation.errors import TandemError
from tandemrt.export.bundle.draft_kinds import FEATURE_DRAFTS
from tandemrt.export.read.quantization.torchao import _SCHEMES as TORCHAO_SCHEMES
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.reference.arguments import sampling_vectors
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.servers.anthropic.request import parse_messages_request
from tandemrt.runtime.servers.batch.lines import BadFile, check_file
from tandemrt.runtime.servers.openai.request_body import parse_chat, parse_completion
from tandemrt.runtime.servers.openai.responses_request import parse_responses
from tandemrt.runtime.servers.triton.request_tensors import parse_request
from tests.plain.constraints import VOCABULARY
from tests.plain.published_images import PUBLISHED as TOWERS
from tests.plain.test_bundle import write_bundle
from tests.plain.test_field_effects import CONFIGS, MODULES, QUANTIZED
from tests.plain.test_generation_config import QWEN3
from tests.plain.test_graph_kinds import GEMMA, HEADS, TARGET, _checkpoint
from tests.plain.test_openai_requests import CHAT_TEMPLATES, TOOLS
from tests.plain.test_published_images import tower_of
from tests.plain.test_quantization_config import CACHE, LAYER, compressed, torchao
from tests.plain.test_quantization_config import read as read_quantization
from tests.plain.test_rules import refusal
from tests.recorded import changes, in_order, require_recorded

FUNCTION: dict[str, Any] = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
IMAGE = "data:image/png;base64,aGVsbG8="
SAMPLED: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2, "max_tokens": 7, "min_tokens": 2,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "logit_bias": {"3": 1.5},
    "stop": ["x", "yz"], "stop_token_ids": [3, 4], "ignore_eos": True, "bad_words": ["w"], "user": "me",
    "truncate_prompt_tokens": 9, "priority": 2, "cache_salt": "s", "stream": True, "request_id": "r", "model": "m",
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True,
    "num_draft_tokens": 2, "rule": "coupled", "timeout_s": 2.5, "thinking_token_budget": 4, "echo": True,
}  # fmt: skip
BODIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "completion": (
        parse_completion,
        {**SAMPLED, "prompt": ["a", "b"], "logprobs": 3, "prompt_logprobs": 2, "structured_outputs": {"json": SCHEMA}},
    ),
    "chat": (
        parse_chat,
        {
            **{name: value for name, value in SAMPLED.items() if name != "echo"},
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "t"}]},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {
                    "name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "r"},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}]},
            ],
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "g"}},
            "parallel_tool_calls": False,
            "logprobs": True,
            "top_logprobs": 2,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"x": 1},
            "include_reasoning": False,
        },
    ),
    "chat of a schema": (
        parse_chat,
        {
            "messages": [{"role": "user", "content": "u", "name": "n"}],
            "max_completion_tokens": 5,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            "add_generation_prompt": False,
            "continue_final_message": True,
            "documents": [{"text": "d"}],
        },
    ),
    "response": (
        parse_responses,
        {
            "model": "m",
            "instructions": "i",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
                {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE, "detail": "auto"}]},
            ],
            "tools": [{"type": "function", **FUNCTION, "strict": True}],
            "tool_choice": "required",
            "max_output_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.5,
            "include": ["reasoning.encrypted_content"],
            "metadata": {"a": "b"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "store": False,
            "stream": True,
            "truncation": "disabled",
            "user": "u",
        },
    ),
    "response of a schema": (
        parse_responses,
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}},
    ),
    "message": (
        parse_messages_request,
        {
            "model": "m",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "h", "signature": ""},
                                                  {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
                {"role": "user", "content": [{"type": "image", "source": {
                    "type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}]},
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 3},
            "stop_sequences": ["x"],
            "stream": True,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.5,
            "metadata": {"user_id": "me"},
        },
    ),
}  # fmt: skip
PARAMS: dict[str, Any] = {
    "text_input": "x", **{name: value for name, value in SAMPLED.items() if name in SamplingParams.model_fields},
    "logit_bias": '{"3": 1.5}', "stream": True, "logprobs": 3,
    "guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA),
}  # fmt: skip
RECORDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sampling": (SamplingParams, {k: v for k, v in SAMPLED.items() if k in SamplingParams.model_fields}),
    "constraint": (StructuredOutputs, {"json": SCHEMA, "whitespace": "any", "engine": "llguidance"}),
    "options": (RuntimeOptions, {name: field.default for name, field in RuntimeOptions.model_fields.items()}),
}
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    **{name: said for name, (said, _) in QUANTIZED.items()},
    "block": compressed({"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64],
                                     "symmetric": True, "dynamic": False}}, kv_cache_scheme=CACHE),
    "nvfp4": compressed({"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                                     "symmetric": True, "dynamic": False}}, format="nvfp4-pack-quantized"),
    "bytes": compressed({"weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}},
                        format="int-quantized"),
    "groups": compressed({"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64,
                                      "symmetric": False}}, format="pack-quantized"),
    **{f"torchao, {kind}": torchao(kind) for kind in TORCHAO_SCHEMES},
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    "fp8, static": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None,
                    "ignored_layers": ["mlp.up_proj"]},
    "quark by channel": {"quant_method": "quark", "global_quant_config": {
        "weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False},
        "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}}},
    "quark in 4 bits": {"quant_method": "quark", "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"},
        "input_tensors": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1,
                          "is_dynamic": True, "scale_format": "e8m0"}}},
}  # fmt: skip


def answer(read: Callable[..., Any], *arguments: Any) -> str:
    try:
        return in_order(str(read(*arguments)))
    except (TandemError, BadFile) as error:
        return f"{type(error).__name__}: {error}"


def copied(record: Any) -> Any:
    return json.loads(json.dumps(record))


def require_answers(
    name: str, record: Any, read: Callable[[Any], Any], every: int = 1, folder: Path = Path("nowhere")
) -> None:
    """What ``read`` makes of ``record``, and of each change of it, is as recorded. ``folder``: where files are read.

    ``record`` is accepted: in one that is refused, most changes would change nothing.
    """
    record = copied(record)
    answers = [in_order(str(read(record))), *(f"{change}: {answer(read, record)}" for change in changes(record, every))]
    require_recorded(name, [text.replace(str(folder), "") for text in answers])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_changed_field_of_a_config_is_read_as_before(name: str) -> None:
    require_answers(f"config/{name}", CONFIGS[name], ModelSpec.from_hf, every=14)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_changed_field_of_a_quantization_is_read_as_before(name: str) -> None:
    def described(said: dict[str, Any]) -> object:
        config = read_quantization(said)
        modules = (*(f"{LAYER}{each}" for each in MODULES), f"{LAYER}mlp.gate", "lm_head")
        return [config.scheme(module) for module in modules], config.notes(), config.float8_cache

    require_answers(f"quantization/{name}", QUANTIZATIONS[name], described)


@pytest.mark.parametrize("name", TOWERS)
def test_a_changed_field_of_a_tower_is_read_as_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, tokens, read = TOWERS[name]
    text = {at: value for at, value in files["config"].items() if at in ("architectures", "text_config", "hidden_size")}

    def tower(changed: dict[str, Any]) -> object:
        config = changed.get("config")
        changed = {**changed, "config": {**config, **text}} if isinstance(config, dict) else {**changed, "config": text}
        monkeypatch.setitem(TOWERS, name, (changed, tokens, read))
        return tower_of(tmp_path, name)

    config = {at: value for at, value in files["config"].items() if at not in text}
    require_answers(f"tower/{name}", {**files, "config": config}, tower, every=14, folder=tmp_path)


@pytest.mark.parametrize("name", HEADS)
def test_a_changed_field_of_a_draft_is_read_as_before(name: str) -> None:
    kind, head = HEADS[name]
    target, checkpoint = ModelSpec.from_hf(GEMMA if kind == "assistant" else TARGET), _checkpoint(head)
    options = SimpleNamespace(ignore_config_fields=(), num_draft_tokens=3)

    def spec(config: dict[str, Any]) -> object:
        changed = type(checkpoint)(checkpoint.folder, config, checkpoint.tensors, ())
        return FEATURE_DRAFTS[kind].read(options, changed, target).spec

    require_answers(f"draft/{name}", checkpoint.config, spec, every=6)


@pytest.mark.parametrize("file", sorted(INCLUDED.glob("*.toml")), ids=lambda file: file.stem)
def test_a_changed_value_of_a_recipe_is_read_as_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(recipe: dict[str, Any]) -> str:
        monkeypatch.setattr(tomllib, "loads", lambda _: copied(recipe))
        return str(Recipe.load(file))

    require_answers(f"recipe/{file.stem}", tomllib.loads(file.read_text()), load, every=5, folder=INCLUDED.parents[1])


def test_a_changed_value_of_a_manifest_is_read_as_before(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path)

    def read(data: dict[str, Any]) -> Manifest:
        (tmp_path / "bundle.json").write_text(json.dumps({**data, DIGEST: _digest(data)}))
        return Manifest.read(tmp_path)

    require_answers("manifest", bundle.manifest.model_dump(mode="json"), read, every=50, folder=tmp_path)


@pytest.mark.parametrize("name", BODIES)
def test_a_changed_field_of_a_body_is_read_as_before(name: str) -> None:
    parse, body = BODIES[name]
    require_answers(f"body/{name}", body, lambda changed: parse(copied(changed), CHAT_TEMPLATES), every=3)


@pytest.mark.parametrize("name", RECORDS)
def test_a_changed_field_of_a_record_is_read_as_before(name: str) -> None:
    record, values = RECORDS[name]
    require_answers(f"record/{name}", values, lambda changed: refusal(record, changed) or record(**changed))


def test_a_changed_field_of_a_thinking_rule_is_read_as_before() -> None:
    delimiters = {"think_start": [60, 61], "think_ends": [[62], [63, 64]], "forced_end": [1, 62, 2]}

    def rule(changed: dict[str, Any]) -> ThinkingRule:
        return ThinkingRule(**(dict.fromkeys(delimiters, ()) | changed), vocabulary=VOCABULARY)

    require_answers("thinking", {**delimiters, "implicit_ends": [[65]], "budget": 4}, rule)


def test_a_changed_sampling_parameter_of_the_definitions_is_read_as_before() -> None:
    def vectors(changed: dict[str, Any]) -> object:
        try:
            return {name: vector.tolist() for name, vector in sampling_vectors(2, **changed).items()}
        except (TypeError, ValueError, OverflowError) as error:
            return type(error).__name__ if "sampling parameters" not in str(error) else error

    values = {name: [0.25, 0.5] if parameter.dtype == "float32" else [1, 0]
              for name, parameter in SAMPLING_PARAMETERS.items()}  # fmt: skip
    require_answers("sampling vectors", values | {"rule": ["coupled", "rejection"]}, vectors)
    assert "unknown_name must not be missing or unknown" in answer(vectors, values | {"unknown_name": 1})


def test_a_changed_parameter_of_triton_is_read_as_before() -> None:
    require_answers("triton", PARAMS, lambda changed: parse_request({}, changed))
    tensors = {"text_input": np.array(["x"], object), "temperature": np.array([0.5], np.float32)}
    other = [np.array(value) for value in (0.5, [0.5, 1.0], [], [[1]], True, "x", [b"\xff"], [1.5e300], [2**40])]
    require_recorded("triton/tensors", (answer(parse_request, tensors | {"top_k": each}) for each in other))


def test_a_changed_field_of_a_generation_config_is_read_as_before(tmp_path: Path) -> None:
    def read(config: dict[str, Any]) -> object:
        (tmp_path / FILE_NAME).write_text(json.dumps(config))
        return recommended(tmp_path)

    more = {"min_p": 0.1, "repetition_penalty": 1.1, "typical_p": 1.0, "num_beams": 1, "max_new_tokens": 9}
    require_answers("generation config", QWEN3 | more, read, every=2, folder=tmp_path)


def test_a_changed_line_of_a_batch_is_read_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # an error shows only the beginning of a long path
    lines = [
        {"custom_id": each, "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
        for each in ("a", "b")
    ]

    def check(changed: list[Any]) -> object:
        file = Path("lines")
        file.write_text("\n".join(map(json.dumps, changed)))
        return check_file(file, ("m",), "/v1/completions", 2)

    require_answers("batch", lines, check)
