"""Triton returns the output of the Python API, in one response or in many."""

import json
from typing import Any

import jsonschema
import pytest

from tandemrt import LLM, RequestOutput, SamplingParams, StructuredOutputs
from tests.serve.client import Client, text, token_ids
from tests.serve.prompts import EXAMPLES, endless, record_inputs

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 1.2, "rule": "rejection"},
    {"temperature": 1.0, "num_draft_tokens": 0},
    {"temperature": 0.9, "thinking_token_budget": 7, "max_tokens": 60},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_generate_equals_the_python_api(demo: Client, llm: LLM, way: dict[str, Any]) -> None:
    example = EXAMPLES[2]
    status, answer = demo.generate(**record_inputs(example, seed=11, **way))
    expected = ask_python(llm, seed=11, **way)
    assert status == 200, answer
    assert (answer["text_output"], answer["reasoning_output"]) == (expected.text, expected.reasoning)
    assert token_ids(answer) == expected.token_ids
    assert answer["finish_reason"] == expected.finish_reason
    assert answer["seed"] == 11
    assert answer["num_input_tokens"] == len(expected.prompt_token_ids)
    assert answer["num_output_tokens"] == len(expected.token_ids)
    assert json.loads(answer["speculation"]) == expected.speculation.to_json()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_stream_joins_to_the_same_output(demo: Client, llm: LLM, way: dict[str, Any]) -> None:
    events = demo.stream(**record_inputs(EXAMPLES[2], seed=12, **way))
    expected = ask_python(llm, seed=12, **way)
    assert len(events) > 3
    assert "".join(event["text_output"] for event in events) == expected.text
    assert "".join(event["reasoning_output"] for event in events) == expected.reasoning
    assert [token for event in events for token in token_ids(event)] == expected.token_ids
    assert sum(event["num_output_tokens"] for event in events) == len(expected.token_ids)
    assert [event.get("finish_reason") for event in events] == [None] * (len(events) - 1) + [expected.finish_reason]


def test_several_outputs_come_in_one_stream(demo: Client, llm: LLM) -> None:
    events = demo.stream(**record_inputs(EXAMPLES[2], seed=12, n=2))
    for index in range(2):
        expected = ask_python(llm, seed=12 + index)
        assert "".join(event["text_output"] for event in events if event["index"] == index) == expected.text
        [seed] = [event["seed"] for event in events if event["index"] == index and "seed" in event]
        assert seed == 12 + index


def test_grpc_gives_one_response_or_many_with_the_same_text(demo: Client, llm: LLM) -> None:
    expected = ask_python(llm, seed=13, temperature=0.7)
    [single] = demo.grpc(**record_inputs(EXAMPLES[2], seed=13, temperature=0.7))
    events = demo.grpc(**record_inputs(EXAMPLES[2], seed=13, temperature=0.7, stream=True))
    assert text([single]) == text(events) == expected.text
    assert text([single], "reasoning_output") == text(events, "reasoning_output") == expected.reasoning
    assert single.as_numpy("token_ids").tolist() == expected.token_ids
    assert len(events) > 3


def test_grpc_returns_exactly_the_requested_outputs(demo: Client) -> None:
    [single] = demo.grpc(outputs=("finish_reason", "seed"), text_input="Hello", max_tokens=4, seed=5)
    assert {output.name for output in single.get_response().outputs} == {"finish_reason", "seed"}
    assert single.as_numpy("seed").tolist() == [5]


def test_a_character_of_several_tokens_is_never_split_in_a_stream(demo: Client, llm: LLM) -> None:
    # One token per byte, so a character beyond ASCII needs several tokens.
    grammar = json.dumps({"regex": "[áéíóúñüßçå]{24}"})
    events = demo.stream(text_input="Lucía", structured_outputs=grammar, seed=3, temperature=1.5)
    joined = "".join(event["text_output"] for event in events)
    params = SamplingParams(seed=3, temperature=1.5, structured_outputs=StructuredOutputs(regex="[áéíóúñüßçå]{24}"))
    assert joined == llm.generate("Lucía", params).text
    assert "\ufffd" not in joined
    assert len(joined) == 24


@pytest.mark.parametrize("example", EXAMPLES[:6], ids=lambda example: example.kind)
def test_a_schema_holds_at_any_temperature(demo: Client, example: Any) -> None:
    status, answer = demo.generate(**record_inputs(example, seed=4, temperature=1.3, thinking_token_budget=40))
    assert status == 200, answer
    if answer["finish_reason"] == "stop":  # "length" ends inside the text
        jsonschema.validate(json.loads(answer["text_output"]), example.schema)
    else:
        assert answer["num_input_tokens"] + answer["num_output_tokens"] == 512


@pytest.mark.parametrize("budget", [0, 1, 6, 23])
def test_a_thinking_budget_is_exact(demo: Client, llm: LLM, budget: int) -> None:
    tokenizer = llm.tokenizer
    start, end = (tokenizer.token_to_id(text) for text in ("<think>", "</think>"))
    _, answer = demo.generate(**record_inputs(EXAMPLES[1], seed=6, temperature=1.0, thinking_token_budget=budget))
    chat = tokenizer.apply_chat_template(EXAMPLES[1].prompt_messages())
    prompt = tokenizer.encode(chat, add_special_tokens=False)
    thought = prompt[prompt.index(start) + 1 :] + token_ids(answer)[: token_ids(answer).index(end)]
    assert len(thought) == max(budget, len(prompt) - prompt.index(start) - 1)


def test_every_kind_of_prompt_gives_the_same_text(demo: Client, llm: LLM) -> None:
    ids = llm.tokenizer.encode("Please send 3 boxes")
    answers = [
        demo.generate(text_input="Please send 3 boxes", seed=1, max_tokens=12)[1],
        demo.generate(input_ids=ids, seed=1, max_tokens=12)[1],
    ]
    assert answers[0]["text_output"] == answers[1]["text_output"]
    assert answers[0]["num_input_tokens"] == len(ids)


def test_the_prompt_is_returned_on_request(demo: Client) -> None:
    plain = demo.generate(text_input="Hello", seed=1, max_tokens=6)[1]["text_output"]
    echoed = demo.generate(text_input="Hello", seed=1, max_tokens=6, exclude_input_in_output=False)[1]["text_output"]
    events = demo.stream(text_input="Hello", seed=1, max_tokens=6, exclude_input_in_output=False)
    assert echoed == "".join(event["text_output"] for event in events) == f"Hello{plain}"


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_arrives(demo: Client, llm: LLM, seed: int) -> None:
    expected = llm.generate("Hello", SamplingParams(seed=seed, max_tokens=6)).text
    _, answer = demo.generate(text_input="Hello", seed=seed, max_tokens=6)
    assert (answer["seed"], answer["text_output"]) == (seed, expected)
    [single] = demo.grpc(text_input="Hello", seed=seed, max_tokens=6)
    assert (single.as_numpy("seed").tolist(), text([single])) == ([seed], expected)


def test_a_seed_below_0_is_the_seed_of_the_same_64_bits(demo: Client) -> None:
    _, below = demo.generate(text_input="Hello", sampling_parameters='{"seed": -1}', max_tokens=6)
    _, above = demo.generate(text_input="Hello", seed=2**64 - 1, max_tokens=6)
    assert (below["seed"], below["text_output"]) == (2**64 - 1, above["text_output"])


def test_messages_may_come_as_a_list_of_texts(demo: Client) -> None:
    messages = EXAMPLES[0].prompt_messages()
    body = {"seed": 1, "max_tokens": 12}
    _, whole = demo.generate(messages=json.dumps(messages), **body)
    status, each = demo.generate(messages=[json.dumps(message) for message in messages], **body)
    assert status == 200, each
    assert (each["text_output"], each["reasoning_output"]) == (whole["text_output"], whole["reasoning_output"])


def test_a_request_may_have_an_id(demo: Client) -> None:
    status, answer = demo.generate(text_input="Hello", max_tokens=3, id="mine")
    assert status == 200, answer


def test_an_output_that_is_not_requested_is_left_out(demo: Client) -> None:
    unwanted = {f"return_{name}": False for name in ("token_ids", "seed", "speculation", "finish_reason")}
    _, answer = demo.generate(text_input="Hello", max_tokens=3, **unwanted)
    assert set(answer) == {
        "model_name", "model_version", "text_output", "reasoning_output", "num_input_tokens", "num_output_tokens",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "guide", "structured"),
    [
        ("regex", "[a-f]{5}", {"regex": "[a-f]{5}"}),
        ("json_schema", '{"type": "integer"}', {"json": '{"type": "integer"}'}),
        ("ebnf_grammar", 'root ::= "yes" | "no"', {"grammar": 'root ::= "yes" | "no"'}),
        ("json", None, {"json_object": True}),
    ],
)
def test_guided_parameters_are_another_name_of_structured_outputs(
    demo: Client, kind: str, guide: str | None, structured: dict[str, Any]
) -> None:
    guided = {"guided_decoding_guide_type": kind} | ({} if guide is None else {"guided_decoding_guide": guide})
    body = {"text_input": "Hello", "seed": 2, "max_tokens": 40}
    ours = demo.generate(**body, structured_outputs=json.dumps(structured))[1]
    assert demo.generate(**body, **guided)[1]["text_output"] == ours["text_output"]


def test_stop_words_end_the_text(demo: Client) -> None:
    whole = demo.generate(**endless(max_tokens=40))[1]["text_output"]
    stop = whole[8:11]
    _, answer = demo.generate(**endless(max_tokens=40, stop_words=[stop, "never in there"]))
    assert answer["text_output"] == whole[: whole.index(stop)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)


def test_the_openai_frontends_request_is_understood(demo: Client) -> None:
    """Triton's frontend sends the form of the vLLM backend and counts one token per response."""
    sampling = {
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "logprobs": False, "n": 1, "stop": [], "seed": 9,
        "temperature": 0.7, "top_p": 1.0, "min_tokens": 0, "ignore_eos": False, "max_tokens": 24,
        "guided_decoding": json.dumps({"json": None, "regex": "[a-z ]{8,40}", "choice": None, "backend": None}),
    }  # fmt: skip
    fields = {
        "text_input": "Hello", "exclude_input_in_output": True, "sampling_parameters": json.dumps(sampling),
        "return_num_input_tokens": True, "return_num_output_tokens": True,
    }  # fmt: skip
    [single] = demo.grpc(**fields, stream=False)
    events = demo.grpc(**fields, stream=True)
    assert text(events) == text([single])
    assert all(event.as_numpy("num_input_tokens").dtype == "uint32" for event in events)
    total = sum(int(event.as_numpy("num_output_tokens")[0]) for event in events)
    assert total == single.as_numpy("num_output_tokens")[0] <= 24


def ask_python(llm: LLM, **way: Any) -> RequestOutput:
    params = SamplingParams(structured_outputs=StructuredOutputs(json=EXAMPLES[2].schema), **way)
    return llm.generate(EXAMPLES[2].prompt_messages(), params)


@pytest.mark.parametrize(("never", "reason"), [("y", "stop"), ("x", "constraint")])
def test_output_validation_finds_a_python_interpreter_inside_the_server(demo: Client, never: str, reason: str) -> None:
    wanted = {"json": {"enum": ["x" * 20], "not": {"pattern": never}}, "validate_output": True}
    status, answer = demo.generate(
        text_input="Hello", temperature=0.0, thinking_token_budget=3, structured_outputs=json.dumps(wanted)
    )
    assert (status, answer["text_output"].strip(), answer["finish_reason"]) == (200, f'"{"x" * 20}"', reason)
    assert ("the finished text is not valid" in answer.get("constraint_error", "")) == (reason == "constraint")
