"""Tensors and parameters of Triton requests: derived from SamplingParams, parsed exactly, rejected with the name."""

import itertools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import create_model

from tandemrt import Chat, SamplingParams
from tandemrt.engines.options.deployment import Deployment
from tandemrt.engines.parameters import server_tensors
from tandemrt.engines.text.chat import ChatOptions
from tandemrt.engines.validation.errors import BadRepository, BadRequest, InternalError
from tandemrt.runtime.servers.triton.request_tensors import parse_request
from tandemrt.runtime.workers.clients import UNNAMED, Client

DTYPES = {"FP32": np.float32, "INT64": np.int64, "UINT64": np.uint64, "BOOL": np.bool_, "BYTES": np.object_}


def test_every_sampling_parameter_is_an_input_of_the_same_name() -> None:
    assert [spec.name for spec in server_tensors.sampling_inputs()] == list(SamplingParams.model_fields)
    assert {spec.datatype for spec in server_tensors.sampling_inputs()} <= set(DTYPES)


def test_a_new_sampling_parameter_becomes_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    wider = create_model("Wider", __base__=SamplingParams, echo_twice=(list[float], []))
    monkeypatch.setattr(server_tensors, "SamplingParams", wider)
    [new] = [spec for spec in server_tensors.inputs() if spec.name == "echo_twice"]
    assert (new.datatype, new.dims, new.optional) == ("FP32", (-1,), True)


def test_a_parameter_type_without_a_tensor_type_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_tensors, "SamplingParams", create_model("Odd", both=(int | str, 0)))
    with pytest.raises(InternalError, match=r"SamplingParams\.both"):
        server_tensors.inputs()


def test_tensor_names_are_unique_and_differ_from_ignored_names() -> None:
    names = [spec.name for spec in server_tensors.inputs()]
    assert len(set(names)) == len(names)
    assert len({spec.name for spec in server_tensors.OUTPUTS}) == len(server_tensors.OUTPUTS)
    assert not set(server_tensors.OFF) & set(names)


def test_the_serving_page_lists_every_tensor() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text().splitlines()
    for title, specs in (("input", server_tensors.inputs()), ("output", server_tensors.OUTPUTS)):
        start = page.index(f"| {title} | type | meaning |") + 2
        table = list(itertools.takewhile(lambda line: line.startswith("|"), page[start:]))
        assert table == [f"| {spec.name} | {spec.datatype}{list(spec.dims)} | {spec.description} |" for spec in specs]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 100, width=32),
            "top_p": st.floats(2.0**-100, 1, width=32),
            "top_k": st.integers(-1, 2**63 - 1),
            "seed": st.integers(0, 2**64 - 1),
            "max_tokens": st.integers(1, 2**63 - 1),
            "stop": st.lists(st.text(min_size=1), max_size=4),
            "stop_token_ids": st.lists(st.integers(0, 2**63 - 1), max_size=4),
            "ignore_eos": st.booleans(),
            "rule": st.sampled_from(["coupled", "rejection"]),
            "structured_outputs": st.just({"choice": ["a", "b"]}),
            "presence_penalty": st.floats(-2, 2, width=32),
            "repetition_penalty": st.floats(0.5, 2, width=32),
            "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1).map(str), st.floats(-100, 100), max_size=3),
        },
    )
)
def test_tensors_and_one_json_object_are_equivalent(values: dict[str, Any]) -> None:
    separate = parse_request(tensors(text_input="x", **values)).params
    bundled = parse_request(tensors(text_input="x", sampling_parameters=json.dumps(values))).params
    direct = SamplingParams(**values)
    for name in SamplingParams.model_fields:
        parsed = (getattr(separate, name), getattr(bundled, name), getattr(direct, name))
        if isinstance(parsed[2], float):
            assert len({np.float32(value) for value in parsed}) == 1
        else:
            assert parsed[0] == parsed[1] == parsed[2]


def test_large_numbers_in_a_json_object_are_exact_or_rejected() -> None:
    def ask(**sampling: Any) -> SamplingParams:
        return parse_request(tensors(text_input="x", sampling_parameters=json.dumps(sampling))).params

    assert [ask(seed=seed).seed for seed in (-1, -(2**63), 2**63, 2**64 - 1)] == [-1, -(2**63), 2**63, 2**64 - 1]
    assert parse_request(tensors(text_input="x", seed=2**64 - 1)).params.seed == 2**64 - 1
    assert ask(max_tokens=2**40).max_tokens == 2**40, "admission knows what the engine has room for"
    for name, value in (("seed", 2**64), ("seed", -(2**63) - 1), ("max_tokens", 2**63), ("max_tokens", -(2**40))):
        with pytest.raises(BadRequest, match=f"{name}: .*; got {value}"):
            ask(**{name: value})
    digits = '{"seed": 1' + "0" * 5000 + "}"
    with pytest.raises(BadRequest, match=r"sampling_parameters: must be JSON, received .*: Exceeds the limit"):
        parse_request(tensors(text_input="x", sampling_parameters=digits))


def test_a_float_tensor_means_its_shortest_decimal() -> None:
    parsed = parse_request(tensors(text_input="x", temperature=0.7, sampling_parameters='{"temperature": 0.7}'))
    assert parsed.params.temperature == 0.7


def test_equal_values_merge_and_different_values_are_rejected() -> None:
    assert parse_request(tensors(text_input="x", max_tokens=5), {"max_tokens": 5}).params.max_tokens == 5
    with pytest.raises(BadRequest, match="max_tokens: given twice, received 5 and 6"):
        parse_request(tensors(text_input="x", max_tokens=5), {"max_tokens": 6})


def test_the_length_of_a_client_is_bounded() -> None:
    longest = "c" * 512
    parsed = parse_request(tensors(text_input="x"), {server_tensors.CLIENT: longest})
    assert parsed.client == Client(user=longest)
    with pytest.raises(BadRequest, match=r"^tandemrt-client: must have at most 512 characters, received 'cc"):
        parse_request(tensors(text_input="x"), {server_tensors.CLIENT: longest + "c"})


def test_foreign_parameters_may_not_ask_for_anything() -> None:
    neutral = {"detokenize": (True,), "spaces_between_special_tokens": (True, False)}
    for name, values in server_tensors.OFF.items():
        number = 0 if name == "top_logprobs" else 1  # one sequence, no penalty
        expected = neutral.get(name, (False,) if isinstance(values[0], bool) else (number,))
        assert [(type(value), value) for value in values] == [(type(each), each) for each in expected], name


@pytest.mark.parametrize(("name", "values"), server_tensors.OFF.items())
def test_foreign_parameters_are_accepted_only_at_values_without_effect(name: str, values: tuple[Any, ...]) -> None:
    for value in (*values, None):
        assert parse_request(tensors(text_input="x"), {name: value}).params == SamplingParams()
    with pytest.raises(BadRequest, match=f"^{name}: is not supported"):
        parse_request(tensors(text_input="x"), {name: 17})


@pytest.mark.parametrize("name", ["max_tokns", "temprature", "streaming", "x"])
def test_an_unknown_name_is_rejected_everywhere(name: str) -> None:
    with pytest.raises(BadRequest, match=f"^{name}: is no input"):
        parse_request(tensors(text_input="x"), {name: 1})
    with pytest.raises(BadRequest, match=f"^{name}: is no input"):
        parse_request(tensors(text_input="x", sampling_parameters=json.dumps({name: 1})))


@pytest.mark.parametrize("name", ["text_input", "input_ids", "stream", "return_seed"])
def test_an_object_of_sampling_parameters_has_neither_prompts_nor_flags(name: str) -> None:
    with pytest.raises(BadRequest, match=f"holds sampling parameters only, received '{name}'; send it as an input"):
        parse_request(tensors(text_input="x", sampling_parameters=json.dumps({name: True})))


def test_tritons_timeout_is_a_number_of_microseconds() -> None:
    assert parse_request(tensors(text_input="x"), timeout_us=1_500_000).params.timeout_s == 1.5
    assert parse_request(tensors(text_input="x"), {"timeout": 250_000}).params.timeout_s == 0.25
    assert parse_request(tensors(text_input="x")).params.timeout_s is None


def test_stop_words_are_stop_strings_and_one_empty_word_is_none() -> None:
    """TensorRT-LLM's clients send an empty string for an unset value."""
    assert parse_request(tensors(text_input="x", stop_words=["a", "b"])).params.stop == ("a", "b")
    assert parse_request(tensors(text_input="x", stop_words=[""])).params == SamplingParams()


def test_flags_choose_the_output_tensors() -> None:
    parsed = parse_request(tensors(text_input="x", stream=True, return_seed=False, exclude_input_in_output=False))
    assert parsed.stream
    assert parsed.echo == "x"
    assert parsed.outputs == {spec.name for spec in server_tensors.OUTPUTS} - {"seed"}


def test_text_that_is_not_utf8_is_rejected() -> None:
    with pytest.raises(BadRequest, match="text_input: must be UTF-8"):
        parse_request({"text_input": np.array([b"\xff\xfe"], np.object_)})


def test_messages_are_one_text_or_one_text_each() -> None:
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert parse_request(tensors(messages=json.dumps(chat))).prompt == Chat(chat)
    assert parse_request(tensors(messages=[json.dumps(message) for message in chat])).prompt == Chat(chat)
    assert parse_request(tensors(messages=json.dumps(chat[0]))).prompt == Chat(chat[:1])
    with pytest.raises(BadRequest, match="messages: must be a JSON list of objects"):
        parse_request(tensors(messages=[json.dumps(chat), json.dumps(chat)]))


def test_chat_options_are_inputs_next_to_messages() -> None:
    assert [spec.name for spec in server_tensors.chat_inputs()] == list(ChatOptions.model_fields)
    chat, tool = [{"role": "user", "content": "x"}], {"type": "function", "function": {"name": "f"}}
    options = {"tools": [tool], "chat_template_kwargs": {"a": [1]}, "add_generation_prompt": False}
    texts = {name: json.dumps(value) for name, value in options.items() if name != "add_generation_prompt"}
    sent = tensors(messages=json.dumps(chat), add_generation_prompt=False, **texts)
    assert parse_request(sent).prompt == Chat(chat, **options)
    assert parse_request(tensors(messages=json.dumps(chat)), options).prompt == Chat(chat, **options)
    with pytest.raises(BadRequest, match="tools: must come with messages, received text_input; leave it out"):
        parse_request(tensors(text_input="x", tools=json.dumps([tool])))
    with pytest.raises(BadRequest, match="holds sampling parameters only, received 'tools'"):
        parse_request(tensors(text_input="x", sampling_parameters=json.dumps({"tools": []})))


def test_a_parameter_names_the_client() -> None:
    assert parse_request(tensors(text_input="x"), {"tandemrt-client": "a"}).client == Client(user="a")
    assert parse_request(tensors(text_input="x")).client == UNNAMED


def test_protocol_parameters_are_not_inputs() -> None:
    protocol = {"id": "mine", "triton_enable_empty_final_response": True}
    assert parse_request(tensors(text_input="x"), protocol) == parse_request(tensors(text_input="x"))


@given(
    st.dictionaries(st.sampled_from([spec.name for spec in server_tensors.inputs()]), st.text(max_size=8), max_size=4)
)
def test_random_inputs_are_rejected_without_a_crash(values: dict[str, str]) -> None:
    """Any texts in request parameters give a request or a BadRequest."""
    with suppress(BadRequest):
        parse_request({}, values)


@pytest.mark.parametrize(
    "values",
    [
        {"num_draft_tokens": 3, "overlap": True, "threads": 2},
        {"queue_limit": 9, "cache_tokens": 640},
        {"cuda_graphs": False},
        {},
    ],
)
def test_a_deployment_round_trips_as_text(values: dict[str, Any]) -> None:
    deployment = Deployment(bundle="bundle", tandemrt_version="1", **values)
    parameters = deployment.parameters()
    assert all(isinstance(value, str) for value in parameters.values())
    assert Deployment.read(parameters | {"EXECUTION_ENV_PATH": "/x"}) == deployment
    assert deployment.llm_arguments() == values


def test_flags_have_the_format_of_a_configuration() -> None:
    parameters = Deployment(bundle="bundle", tandemrt_version="1", overlap=True, generation_config=False).parameters()
    assert (parameters["overlap"], parameters["generation_config"]) == ("true", "false")


@pytest.mark.parametrize(
    ("key", "value"), [("num_draft_tokns", "3"), ("num_draft_tokens", "many"), ("queue_limit", "0")]
)
def test_a_deployment_rejects_unknown_parameters(key: str, value: str) -> None:
    with pytest.raises(BadRepository, match=key):
        Deployment.read({"bundle": "bundle", "tandemrt_version": "1", key: value})


def tensors(**values: Any) -> dict[str, np.ndarray]:
    """Return values as Triton passes them: arrays of one dimension, text as bytes, objects as JSON."""
    specs = {spec.name: spec for spec in server_tensors.inputs()}
    arrays = {}
    for name, value in values.items():
        content = json.dumps(value) if isinstance(value, dict) else value
        items = content if isinstance(content, list) else [content]
        items = [item.encode() if isinstance(item, str) else item for item in items]
        arrays[name] = np.array(items, DTYPES[specs[name].datatype])
    return arrays
