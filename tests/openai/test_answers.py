"""Responses to OpenAI's own client: the text of the Python API in OpenAI's objects."""

import asyncio
import json
import random
import threading
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

import tandemrt
from tandemrt import LLM, Chat, SamplingParams, StreamOutput, StructuredOutputs
from tandemrt.runtime.servers.http.async_stream import AsyncRequestStream
from tandemrt.runtime.servers.http.connections import LimitedProtocol
from tests.openai.client import EXAMPLES, Served, asking, endless, events
from tests.waiting import PATIENCE_S, Clock, eventually
from tools.demo.corpus import Example


def answer_of(llm: LLM, example: Example, **params: Any) -> Any:
    structured = StructuredOutputs(json=example.schema)
    return llm.generate(example.prompt_messages(), SamplingParams(structured_outputs=structured, **params))


def test_a_chat_completion_equals_the_python_api(client: openai.OpenAI, llm: LLM) -> None:
    expected = answer_of(llm, EXAMPLES[0], seed=7)
    answer = client.chat.completions.create(**asking(EXAMPLES[0], seed=7))
    choice = answer.choices[0]
    assert choice.message.content == expected.text
    assert choice.message.reasoning_content == choice.message.reasoning == expected.reasoning != ""
    assert (choice.finish_reason, choice.seed) == ("stop", 7)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 64  # it was asked just before
    assert answer.usage.completion_tokens_details.reasoning_tokens == expected.reasoning_tokens > 0
    assert answer.metrics["speculative_decoding"] == expected.speculation.to_json()


def test_a_stream_has_the_same_text(client: openai.OpenAI, llm: LLM) -> None:
    expected = answer_of(llm, EXAMPLES[1], seed=7)
    stream = client.chat.completions.create(
        **asking(EXAMPLES[1], seed=7, stream=True, stream_options={"include_usage": True})
    )
    *chunks, last = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == expected.text
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == expected.reasoning
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [*[None] * (len(chunks) - 1), "stop"]
    assert (last.choices, last.usage.completion_tokens) == ([], len(expected.token_ids))
    assert len(chunks) > 3


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_has_the_same_text_whichever_parts_are_written_at_once(
    client: openai.OpenAI, llm: LLM, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    expected = answer_of(llm, EXAMPLES[1], seed=7)
    chance, at_once, write_part = random.Random(seed), [False], LimitedProtocol._write_part

    def write(connection: LimitedProtocol, cycle: Any, part: bytes) -> bool:
        at_once.append(chance.random() < seed / 3 and write_part(connection, cycle, part))
        return at_once[-1]

    monkeypatch.setattr(LimitedProtocol, "_write_part", write)
    deltas = [
        chunk.choices[0].delta for chunk in client.chat.completions.create(**asking(EXAMPLES[1], seed=7, stream=True))
    ]
    assert "".join(delta.content or "" for delta in deltas) == expected.text
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == expected.reasoning
    assert any(at_once) == (seed > 0)


def test_thinking_can_be_disabled(client: openai.OpenAI, llm: LLM) -> None:
    """D4."""
    variables = {"enable_thinking": False}
    chat = Chat(EXAMPLES[0].prompt_messages(), chat_template_kwargs=variables)
    expected = llm.generate(chat, SamplingParams(seed=7, max_tokens=24))
    answer = client.chat.completions.create(
        model="demo",
        messages=EXAMPLES[0].prompt_messages(),
        seed=7,
        max_tokens=24,
        extra_body={"chat_template_kwargs": variables},
    )
    assert (answer.choices[0].message.content, expected.reasoning) == (expected.text, "")
    thinking = llm.generate(EXAMPLES[0].prompt_messages(), SamplingParams(seed=7, max_tokens=24))
    assert thinking.reasoning != ""


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        (
            {"chat_template_kwargs": {"enable": 1, "enable_thinking": False}},
            "chat_template_kwargs: the chat template reads enable_thinking, received 'enable'; it was ignored",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs: the chat template reads enable_thinking, received 'reasoning_effort'; "
            "it was ignored",
        ),
        (
            {"reasoning_effort": "low"},
            "reasoning_effort: the chat template reads enable_thinking, received 'reasoning_effort'; it was ignored",
        ),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_ignored_with_a_warning(
    served: Served, fields: dict[str, Any], warning: str
) -> None:
    variables = {"enable_thinking": False} if "chat_template_kwargs" in fields else {}
    asked = asking(EXAMPLES[0], seed=7, max_tokens=8)
    _, plain, _ = served.ask("/v1/chat/completions", {**asked, "chat_template_kwargs": variables})
    status, body, _ = served.ask("/v1/chat/completions", {**asked, **fields})
    assert (status, body["choices"], body["warnings"]) == (200, plain["choices"], [warning])
    assert "warnings" not in plain
    streaming = {"stream": True, "stream_options": {"include_usage": True}}  # the usage is a second chunk at least
    connection = served.send("/v1/chat/completions", {**asked, **fields, **streaming})
    streamed = [*events(connection.getresponse())]
    connection.close()
    assert [chunk.get("warnings") for chunk in streamed] == [[warning], *[None] * (len(streamed) - 1)]


def test_responses_match_openais_schema(served: Served) -> None:
    status, body, _ = served.ask("/v1/chat/completions", asking(EXAMPLES[2], seed=1))
    assert status == 200
    ChatCompletion.model_validate(body, strict=True)
    options = {"include_usage": True, "continuous_usage_stats": True}
    connection = served.send("/v1/chat/completions", asking(EXAMPLES[2], seed=1, stream=True, stream_options=options))
    chunks = list(events(connection.getresponse()))
    connection.close()
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    streamed = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert streamed == sorted(streamed)
    assert streamed[-1] == body["usage"]["completion_tokens"]


def test_an_answer_parses_into_a_pydantic_model(client: openai.OpenAI) -> None:
    class Order(BaseModel):
        kind: Literal["order"]
        customer: str
        currency: Literal["EUR", "USD", "GBP"]

    message = {"role": "user", "content": "Please put 1 pine box at £26.55 on the account of Leo Conti."}
    answer = client.chat.completions.parse(model="demo", messages=[message], response_format=Order, temperature=0)
    assert answer.choices[0].message.parsed == Order(kind="order", customer="Leo Conti", currency="GBP")


def test_an_async_client_gets_the_same_text(served: Served, llm: LLM) -> None:
    expected = answer_of(llm, EXAMPLES[3], seed=5)

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(**asking(EXAMPLES[3], seed=5, stream=True))
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == expected.text


def test_a_completion_equals_the_python_api(client: openai.OpenAI, llm: LLM) -> None:
    params = {"seed": 2, "max_tokens": 12, "temperature": 0.8}
    expected = llm.generate("Please send", SamplingParams(**params))
    answer = client.completions.create(model="demo", prompt="Please send", **params)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, "length")
    ids = client.completions.create(model="demo", prompt=expected.prompt_token_ids, **params)
    assert ids.choices[0].text == expected.text
    stream = client.completions.create(model="demo", prompt=["Please send"], stream=True, **params)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_the_prompt_before_each_text(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    expected = [llm.generate("Please send", SamplingParams(seed=2 + at, max_tokens=9)).text for at in range(2)]
    for prompt in ("Please send", llm.tokenizer.encode("Please send")):
        asked: dict[str, Any] = {"model": "demo", "prompt": prompt, "seed": 2, "max_tokens": 9, "n": 2}
        answer = client.completions.create(**asked, echo=True, stream=stream)
        texts = ["", ""]
        for part in answer if stream else [answer]:
            for choice in part.choices:
                texts[choice.index] += choice.text
        assert texts == [f"Please send{each}" for each in expected]


@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_prompts_has_the_choices_of_each(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    prompts = ["Please send", "Two boxes of", "Please send"]
    params = [SamplingParams(seed=2 + at, max_tokens=9) for at in range(2)]
    expected = [f"{prompt}{llm.generate(prompt, each).text}" for prompt in prompts for each in params]
    asked: dict[str, Any] = {"model": "demo", "seed": 2, "max_tokens": 9, "n": 2, "echo": True}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    lists: list[Any] = [prompts, [llm.tokenizer.encode(prompt) for prompt in prompts]]
    for prompt in lists:
        answer: Any = client.completions.create(prompt=prompt, **asked)
        parts = list(answer) if stream else [answer]
        texts = [""] * 6
        for choice in (choice for part in parts for choice in part.choices):
            texts[choice.index] += choice.text
        assert texts == expected
        usage = parts[-1].usage
        assert usage.prompt_tokens == sum(len(llm.tokenizer.encode(prompt)) for prompt in prompts)
        assert usage.completion_tokens <= 6 * 9


def test_a_prompt_of_a_list_that_is_rejected_rejects_the_request(served: Served) -> None:
    status, body, _ = served.ask("/v1/completions", endless(prompt=["x", "", "y"]))
    assert (status, body["error"]["param"]) == (400, "prompt")
    assert eventually(lambda: served.llm.running == served.llm.waiting == 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": "the"},
        {"stop": ["a", "the"], "include_stop_str_in_output": True},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {"70": 5, "71": -100}},
        {"top_p": 0.5, "top_k": 4, "min_p": 0.1},
        {"top_n_sigma": 0.8},
        {"num_draft_tokens": 0},
        {"rule": "rejection"},
        {"min_tokens": 5, "stop_token_ids": [70]},
        {"structured_outputs": {"regex": "[a-c]{3,9}"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_sampling_parameter_is_a_field(served: Served, llm: LLM, fields: dict[str, Any]) -> None:
    expected = llm.generate("Please send", SamplingParams(seed=4, max_tokens=24, **fields))
    status, body, _ = served.ask("/v1/completions", {"prompt": "Please send", "seed": 4, "max_tokens": 24, **fields})
    choice = body["choices"][0]
    assert status == 200
    assert choice["text"] == expected.text
    assert (choice["native_finish_reason"], choice["stop_reason"]) == (expected.finish_reason, expected.stop_reason)
    assert body["metrics"]["speculative_decoding"] == expected.speculation.to_json()


def test_a_thinking_budget_ends_the_reasoning(client: openai.OpenAI, llm: LLM) -> None:
    expected = answer_of(llm, EXAMPLES[0], seed=7, thinking_token_budget=5)
    answer = client.chat.completions.create(**asking(EXAMPLES[0], seed=7, extra_body={"thinking_token_budget": 5}))
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens == expected.reasoning_tokens <= 5
    assert answer.choices[0].message.content == expected.text


def test_the_response_has_the_drawn_seed(client: openai.OpenAI) -> None:
    first = client.completions.create(model="demo", prompt="Please send", max_tokens=16)
    again = client.completions.create(model="demo", prompt="Please send", max_tokens=16, seed=first.choices[0].seed)
    assert again.choices[0].text == first.choices[0].text


def test_json_object_is_a_response_format(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Two "}, {"type": "text", "text": "boxes."}]}],
        response_format={"type": "json_object"},
        max_completion_tokens=300,
        seed=1,
        extra_body={"thinking_token_budget": 0},
    )
    content = answer.choices[0].message.content
    assert content.startswith("{")
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(content), dict)


def test_a_timeout_before_the_first_token_is_status_504(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen, release = Clock(monkeypatch), threading.Event(), threading.Event()

    def hold(_: StreamOutput) -> None:
        seen.set()
        release.wait(PATIENCE_S)

    served.llm.submit("x", SamplingParams(max_tokens=1), hold)
    assert seen.wait(PATIENCE_S)
    connection = served.send("/v1/completions", endless(timeout_s=1000))
    assert eventually(lambda: served.llm.waiting == 1)
    clock.ahead = 2000.0
    release.set()
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (504, "timeout")
    connection.close()


def test_models_are_listed_and_found_by_name(client: openai.OpenAI, served: Served) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").max_model_len == 512
    with pytest.raises(openai.NotFoundError, match=r"must be one of demo, received 'gpt'"):
        client.models.retrieve("gpt")
    assert served.ask("/version")[:2] == (200, {"version": tandemrt.__version__})
    assert served.ask("/health")[:2] == (200, {"status": "ok", "closed": []})


def test_metrics_count_what_was_answered(served: Served) -> None:
    before = served.metrics()
    _, body, _ = served.ask("/v1/completions", endless(max_tokens=20))
    assert body["usage"]["completion_tokens"] == 20
    after = served.metrics()
    assert after["tandemrt_kept_total"] - before["tandemrt_kept_total"] == 20
    assert after["tandemrt_finished_total length"] - before.get("tandemrt_finished_total length", 0) == 1
    assert (
        after["tandemrt_time_to_first_token_seconds_count"] - before["tandemrt_time_to_first_token_seconds_count"] == 1
    )
    assert after["tandemrt_requests_running"] == after["tandemrt_requests_waiting"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_only_a_stream_is_notified_each_round(served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """The text and the metrics of its tokens are the same."""
    items: list[StreamOutput] = []
    on_output = AsyncRequestStream.on_output

    def record(self: AsyncRequestStream, item: StreamOutput) -> None:
        items.append(item)
        on_output(self, item)

    monkeypatch.setattr(AsyncRequestStream, "on_output", record)
    body, before = endless(max_tokens=40, seed=7, stream=stream), served.metrics()
    connection = served.send("/v1/completions", body)
    response = connection.getresponse()
    answers = list(events(response)) if stream else [json.load(response)]
    connection.close()
    after = served.metrics()
    expected = served.llm.generate(body["prompt"], SamplingParams(max_tokens=40, seed=7, ignore_eos=True))
    assert "".join(answer["choices"][0]["text"] for answer in answers) == expected.text
    assert sum(len(item.token_ids) for item in items) == 40
    assert (len(items) > 1) is stream
    names = ("kept_total", "time_to_first_token_seconds_count", "inter_token_seconds_count")
    kept, first, intervals = (after[f"tandemrt_{name}"] - before[f"tandemrt_{name}"] for name in names)
    assert (kept, first) == (40, 1)
    assert 30 <= intervals < 40  # further tokens of the first round have no interval


def test_logprobs_come_with_a_chat_and_with_a_completion(client: openai.OpenAI, llm: LLM) -> None:
    asked = asking(EXAMPLES[0], seed=7, max_tokens=12)
    content = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    expected = answer_of(llm, EXAMPLES[0], seed=7, max_tokens=12, logprobs=2)
    assert [each.logprob for each in content] == [each.logprob for each in expected.logprobs]
    assert [each.token for each in content] == [llm.tokenizer.decode([token]) for token in expected.token_ids]
    assert [len(each.top_logprobs) for each in content] == [len(each.top) for each in expected.logprobs]
    completion = client.completions.create(model=asked["model"], prompt="x", logprobs=1, max_tokens=3, seed=1)
    assert len(completion.choices[0].logprobs.token_logprobs) == completion.usage.completion_tokens


def test_a_stream_has_the_same_logprobs(client: openai.OpenAI) -> None:
    asked = asking(EXAMPLES[0], seed=7, max_tokens=12, logprobs=True, top_logprobs=1)
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert [each for chunk in chunks if chunk.logprobs for each in chunk.logprobs.content] == whole
    assert sum(chunk.logprobs is not None for chunk in chunks) > 1

    text: dict[str, Any] = {"model": "demo", "prompt": "x", "logprobs": 2, "max_tokens": 9, "seed": 1}
    completion = client.completions.create(**text).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**text, stream=True)]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [getattr(part, field) for part in parts if part is not None]
        assert [each for part in streamed for each in part] == getattr(completion, field)


def test_output_i_has_the_text_of_seed_plus_i(client: openai.OpenAI, llm: LLM) -> None:
    expected = [answer_of(llm, EXAMPLES[1], seed=7 + index) for index in range(3)]
    asked = asking(EXAMPLES[1], seed=7, n=3)
    answer = client.chat.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == [each.text for each in expected]
    assert [choice.seed for choice in answer.choices] == [7, 8, 9]
    assert answer.usage.prompt_tokens == len(expected[0].prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(each.token_ids) for each in expected)
    steps = [each.speculation.num_spec_steps for each in expected]
    assert answer.metrics["speculative_decoding"]["num_spec_steps"] == sum(steps)

    texts, ends = ["", "", ""], [None, None, None]
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for choice in (chunk.choices[0] for chunk in chunks):
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert (texts, ends) == ([each.text for each in expected], ["stop"] * 3)
    assert (last.choices, last.usage.completion_tokens) == ([], answer.usage.completion_tokens)
    texts = [choice.text for choice in client.completions.create(model="demo", prompt="x", n=2, max_tokens=5).choices]
    assert len(texts) == 2


def test_the_last_chunk_has_prompt_logprobs_in_vllms_form(served: Served, llm: LLM) -> None:
    asked = {"prompt": "Please send", "prompt_logprobs": 1, "max_tokens": 3, "seed": 1}
    output = llm.generate("Please send", SamplingParams(prompt_logprobs=1, max_tokens=3, seed=1))
    whole = served.ask("/v1/completions", asked)[1]["choices"][0]["prompt_logprobs"]
    connection = served.send("/v1/completions", asked | {"stream": True})
    *chunks, last = (chunk["choices"][0] for chunk in events(connection.getresponse()))
    connection.close()
    assert last["prompt_logprobs"] == whole
    assert not any("prompt_logprobs" in chunk for chunk in chunks)
    assert whole[0] is None
    streamed = [each[str(token)]["logprob"] for each, token in zip(whole[1:], output.prompt_token_ids[1:], strict=True)]
    assert streamed == [each.logprob for each in output.prompt_logprobs or ()]


def test_token_ids_are_returned_with_and_without_streaming(served: Served, llm: LLM) -> None:
    asked = asking(EXAMPLES[0], seed=7, max_tokens=20, return_token_ids=True)
    expected = answer_of(llm, EXAMPLES[0], seed=7, max_tokens=20)
    choice = served.ask("/v1/chat/completions", asked)[1]["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (expected.token_ids, expected.prompt_token_ids)
    connection = served.send("/v1/chat/completions", asked | {"stream": True})
    chunks = [chunk["choices"][0] for chunk in events(connection.getresponse())]
    connection.close()
    assert [token for chunk in chunks for token in chunk["token_ids"]] == expected.token_ids
    assert chunks[-1]["prompt_token_ids"] == expected.prompt_token_ids


def test_a_misspelled_keyword_of_a_schema_is_named_in_the_warnings(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minmum": 3}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    status, body, _ = served.ask("/v1/chat/completions", asking(EXAMPLES[0], max_tokens=4, response_format=form))
    [warning] = body["warnings"]
    assert status == 200
    assert "#/properties/a/minmum: is not a keyword and was ignored; did you mean 'minimum'?" in warning
