"""What a server takes and gives: derived from SamplingParams, read exactly, refused by name."""

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
from tandemrt.engines import serving
from tandemrt.engines.chat import ChatOptions
from tandemrt.engines.deployment import Deployment
from tandemrt.engines.errors import BadRepository, BadRequest, InternalError
from tandemrt.runtime.triton.requests import read_request

DTYPES = {"FP32": np.float32, "INT64": np.int64, "UINT64": np.uint64, "BOOL": np.bool_, "BYTES": np.object_}


def test_every_sampling_parameter_is_an_input_of_its_own_name() -> None:
    assert [spec.name for spec in serving.sampling_inputs()] == list(SamplingParams.model_fields)
    assert {spec.datatype for spec in serving.sampling_inputs()} <= set(DTYPES)


def test_a_new_sampling_parameter_becomes_an_input_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    wider = create_model("Wider", __base__=SamplingParams, echo_twice=(list[float], []))
    monkeypatch.setattr(serving, "SamplingParams", wider)
    [new] = [spec for spec in serving.inputs() if spec.name == "echo_twice"]
    assert (new.datatype, new.dims, new.optional) == ("FP32", (-1,), True)


def test_a_parameter_that_fits_no_tensor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SamplingParams", create_model("Odd", both=(int | str, 0)))
    with pytest.raises(InternalError, match=r"SamplingParams\.both"):
        serving.inputs()


def test_names_of_inputs_and_outputs_are_unique_and_no_foreign_name_hides_one() -> None:
    names = [spec.name for spec in serving.inputs()]
    assert len(set(names)) == len(names)
    assert len({spec.name for spec in serving.OUTPUTS}) == len(serving.OUTPUTS)
    assert not set(serving.OFF) & set(names)


def test_the_page_on_serving_lists_every_tensor_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text().splitlines()
    for title, specs in (("input", serving.inputs()), ("output", serving.OUTPUTS)):
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
def test_tensors_and_one_json_object_ask_for_the_same(values: dict[str, Any]) -> None:
    separate = read_request(tensors(text_input="x", **values)).params
    bundled = read_request(tensors(text_input="x", sampling_parameters=json.dumps(values))).params
    direct = SamplingParams(**values)
    for name in SamplingParams.model_fields:
        found = (getattr(separate, name), getattr(bundled, name), getattr(direct, name))
        if isinstance(found[2], float):
            assert len({np.float32(value) for value in found}) == 1
        else:
            assert found[0] == found[1] == found[2]


def test_numbers_that_no_tensor_holds_arrive_whole_in_one_json_object_or_are_refused_by_their_value() -> None:
    def ask(**sampling: Any) -> SamplingParams:
        return read_request(tensors(text_input="x", sampling_parameters=json.dumps(sampling))).params

    assert [ask(seed=seed).seed for seed in (-1, -(2**63), 2**63, 2**64 - 1)] == [-1, -(2**63), 2**63, 2**64 - 1]
    assert read_request(tensors(text_input="x", seed=2**64 - 1)).params.seed == 2**64 - 1
    assert ask(max_tokens=2**40).max_tokens == 2**40, "admission knows what the engine has room for"
    for name, value in (("seed", 2**64), ("seed", -(2**63) - 1), ("max_tokens", 2**63), ("max_tokens", -(2**40))):
        with pytest.raises(BadRequest, match=f"{name}: .*; got {value}"):
            ask(**{name: value})
    digits = '{"seed": 1' + "0" * 5000 + "}"
    with pytest.raises(BadRequest, match=r"sampling_parameters: must be JSON, received .*: Exceeds the limit"):
        read_request(tensors(text_input="x", sampling_parameters=digits))


def test_a_float_tensor_means_the_decimal_it_was_written_as() -> None:
    ask = read_request(tensors(text_input="x", temperature=0.7, sampling_parameters='{"temperature": 0.7}'))
    assert ask.params.temperature == 0.7


def test_the_same_value_twice_is_one_value_and_two_values_are_refused() -> None:
    assert read_request(tensors(text_input="x", max_tokens=5), {"max_tokens": 5}).params.max_tokens == 5
    with pytest.raises(BadRequest, match="max_tokens: given twice, received 5 and 6"):
        read_request(tensors(text_input="x", max_tokens=5), {"max_tokens": 6})


@pytest.mark.parametrize(("name", "values"), serving.OFF.items())
def test_a_foreign_parameter_is_accepted_at_the_value_that_asks_for_nothing_alone(
    name: str, values: tuple[Any, ...]
) -> None:
    for value in (*values, None):
        assert read_request(tensors(text_input="x"), {name: value}).params == SamplingParams()
    with pytest.raises(BadRequest, match=f"^{name}: is not supported"):
        read_request(tensors(text_input="x"), {name: 17})


@pytest.mark.parametrize("name", ["max_tokns", "temprature", "streaming", "x"])
def test_an_unknown_name_is_refused_wherever_it_stands(name: str) -> None:
    with pytest.raises(BadRequest, match=f"^{name}: is no input"):
        read_request(tensors(text_input="x"), {name: 1})
    with pytest.raises(BadRequest, match=f"^{name}: is no input"):
        read_request(tensors(text_input="x", sampling_parameters=json.dumps({name: 1})))


@pytest.mark.parametrize("name", ["text_input", "input_ids", "stream", "return_seed"])
def test_an_object_of_sampling_parameters_holds_neither_prompts_nor_flags(name: str) -> None:
    with pytest.raises(BadRequest, match=f"holds sampling parameters only, received '{name}'; send it as an input"):
        read_request(tensors(text_input="x", sampling_parameters=json.dumps({name: True})))


def test_tritons_timeout_is_a_number_of_microseconds() -> None:
    assert read_request(tensors(text_input="x"), timeout_us=1_500_000).params.timeout_s == 1.5
    assert read_request(tensors(text_input="x"), {"timeout": 250_000}).params.timeout_s == 0.25
    assert read_request(tensors(text_input="x")).params.timeout_s is None


def test_stop_words_are_stop_strings_and_one_empty_word_is_none() -> None:
    """TensorRT-LLM's clients send an empty string where they mean nothing."""
    assert read_request(tensors(text_input="x", stop_words=["a", "b"])).params.stop == ("a", "b")
    assert read_request(tensors(text_input="x", stop_words=[""])).params == SamplingParams()


def test_flags_choose_what_comes_back() -> None:
    ask = read_request(tensors(text_input="x", stream=True, return_seed=False, exclude_input_in_output=False))
    assert ask.stream
    assert ask.echo == "x"
    assert ask.returns == {spec.name for spec in serving.OUTPUTS} - {"seed"}


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(BadRequest, match="text_input: must be UTF-8"):
        read_request({"text_input": np.array([b"\xff\xfe"], np.object_)})


def test_messages_come_as_one_text_or_as_a_text_each() -> None:
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert read_request(tensors(messages=json.dumps(chat))).prompt == Chat(chat)
    assert read_request(tensors(messages=[json.dumps(message) for message in chat])).prompt == Chat(chat)
    assert read_request(tensors(messages=json.dumps(chat[0]))).prompt == Chat(chat[:1])
    with pytest.raises(BadRequest, match="messages: must be a JSON list of objects"):
        read_request(tensors(messages=[json.dumps(chat), json.dumps(chat)]))


def test_what_is_said_of_messages_comes_beside_them() -> None:
    assert [spec.name for spec in serving.chat_inputs()] == list(ChatOptions.model_fields)
    chat, tool = [{"role": "user", "content": "x"}], {"type": "function", "function": {"name": "f"}}
    options = {"tools": [tool], "chat_template_kwargs": {"a": [1]}, "add_generation_prompt": False}
    given = {name: json.dumps(value) for name, value in options.items() if name != "add_generation_prompt"}
    sent = tensors(messages=json.dumps(chat), add_generation_prompt=False, **given)
    assert read_request(sent).prompt == Chat(chat, **options)
    assert read_request(tensors(messages=json.dumps(chat)), options).prompt == Chat(chat, **options)
    with pytest.raises(BadRequest, match="tools: must come with messages, received text_input; leave it out"):
        read_request(tensors(text_input="x", tools=json.dumps([tool])))
    with pytest.raises(BadRequest, match="holds sampling parameters only, received 'tools'"):
        read_request(tensors(text_input="x", sampling_parameters=json.dumps({"tools": []})))


def test_a_parameter_names_the_client() -> None:
    assert read_request(tensors(text_input="x"), {"tandemrt-client": "a"}).client == "a"
    assert read_request(tensors(text_input="x")).client == ""


def test_the_protocols_own_parameters_are_no_inputs() -> None:
    given = {"id": "mine", "triton_enable_empty_final_response": True}
    assert read_request(tensors(text_input="x"), given) == read_request(tensors(text_input="x"))


@given(st.dictionaries(st.sampled_from([spec.name for spec in serving.inputs()]), st.text(max_size=8), max_size=4))
def test_nonsense_is_refused_and_never_crashes(values: dict[str, str]) -> None:
    """Whatever texts arrive as request parameters, the only way out is a request or a BadRequest."""
    with suppress(BadRequest):
        read_request({}, values)


@pytest.mark.parametrize(
    "values",
    [{"window": 3, "overlap": True, "threads": 2}, {"queue_limit": 9, "cache_tokens": 640}, {"cuda_graphs": False}, {}],
)
def test_a_deployment_survives_the_servers_text_form(values: dict[str, Any]) -> None:
    deployment = Deployment(bundle="bundle", tandemrt_version="1", **values)
    parameters = deployment.parameters()
    assert all(isinstance(value, str) for value in parameters.values())
    assert Deployment.read(parameters | {"EXECUTION_ENV_PATH": "/x"}) == deployment
    assert deployment.llm_arguments() == values


def test_a_flag_is_written_as_a_configuration_writes_it() -> None:
    parameters = Deployment(bundle="bundle", tandemrt_version="1", overlap=True, generation_config=False).parameters()
    assert (parameters["overlap"], parameters["generation_config"]) == ("true", "false")


@pytest.mark.parametrize(("key", "value"), [("widnow", "3"), ("window", "many"), ("queue_limit", "0")])
def test_a_deployment_refuses_what_it_does_not_know(key: str, value: str) -> None:
    with pytest.raises(BadRepository, match=key):
        Deployment.read({"bundle": "bundle", "tandemrt_version": "1", key: value})


def tensors(**values: Any) -> dict[str, np.ndarray]:
    """Values as the server hands them over: arrays of one dimension, text as bytes, objects as JSON."""
    specs = {spec.name: spec for spec in serving.inputs()}
    arrays = {}
    for name, value in values.items():
        given = json.dumps(value) if isinstance(value, dict) else value
        items = given if isinstance(given, list) else [given]
        items = [item.encode() if isinstance(item, str) else item for item in items]
        arrays[name] = np.array(items, DTYPES[specs[name].datatype])
    return arrays
