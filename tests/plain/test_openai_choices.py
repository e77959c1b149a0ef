"""Choices and responses of the OpenAI server: every value that a client reads, complete and streamed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt import SamplingParams
from tandemrt.engines.text.tokenizer import Tokenizer
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.request import RequestOutput, Speculation
from tandemrt.runtime.servers.json_text import encode_event
from tandemrt.runtime.servers.openai.choices import ChatChoice, CompletionChoice
from tandemrt.runtime.servers.openai.formatters import ChatFormatter, CompletionFormatter, usage_of
from tandemrt.runtime.servers.openai.protocol import Function, StreamOptions
from tandemrt.runtime.servers.openai.request_body import CompletionRequest
from tandemrt.runtime.servers.openai.token_texts import TokenText
from tandemrt.runtime.servers.openai.tools import ToolCallSpec
from tandemrt.runtime.servers.request_stream import OutputDelta
from tests.plain.tool_call_templates import HERMES, LLAMA, begin_of

FORMATS = HERMES, LLAMA
GET = Function(name="get")
CALL = begin_of(HERMES, "get") + "{}" + HERMES.last
TOKEN_TEXTS = {1: "a", 2: "bé", 3: "", 4: "日本"}
KINDS = [CompletionChoice, ChatChoice]
TOKENIZER = cast("Tokenizer", None)  # only logprobs and echo read it


def output_of(text: str = "", finish_reason: str = "stop", **values: Any) -> RequestOutput:
    fields: dict[str, Any] = {
        "reasoning": "",
        "token_ids": [],
        "prompt_token_ids": [5, 6, 7],
        "stop_reason": None,
        "seed": 11,
        "speculation": Speculation(2),
    }
    return RequestOutput(text=text, finish_reason=finish_reason, **fields | values)


def delta_of(
    text: str = "",
    output: RequestOutput | None = None,
    *,
    index: int = 0,
    reasoning: str = "",
    tokens: Sequence[int] = (),
    logprobs: Sequence[TokenLogprobs] = (),
) -> OutputDelta:
    return OutputDelta(index, text, reasoning, list(tokens), logprobs, output)


def token_text(token: int, *, first: bool = False) -> TokenText:
    text = TOKEN_TEXTS[token]
    return TokenText(text.lstrip(" ") if first else text, text.encode())


def choice_of(kind: type[CompletionChoice], index: int = 0, **options: Any) -> Any:
    return kind(index, token_text, **options)


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("stop_reason", [None, 7, "half"])
@pytest.mark.parametrize(
    ("native", "reason"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("timeout", "length"),
        ("constraint", "content_filter"),
        ("cancelled", "cancelled"),
        ("error", "error"),
    ],
)
def test_only_a_complete_answer_finishes_with_tool_calls(
    native: str, reason: str, stop_reason: str | int | None, called: bool
) -> None:
    """A limit, a constraint, an error or a stop string may have cut the last call."""
    text = CALL if called else "no call"
    output = output_of(text, native, stop_reason=stop_reason)
    spec = ToolCallSpec([GET], format=HERMES)
    expected = "tool_calls" if called and native == "stop" and stop_reason in (None, 7) else reason
    end = {"finish_reason": expected, "native_finish_reason": native, "stop_reason": stop_reason, "seed": 11}
    complete = choice_of(ChatChoice, tool_calls=spec).complete(output)
    *_, streamed = choice_of(ChatChoice, tool_calls=spec).chunks(delta_of(text, output))
    without_text = choice_of(CompletionChoice).complete(output)
    assert end.items() <= complete.items()
    assert end.items() <= streamed.items()
    assert without_text["finish_reason"] == reason


@pytest.mark.parametrize("error", [None, "BadRequest: no"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_a_field_of_the_choice_only_if_there_is_one(
    kind: type[CompletionChoice], error: str | None
) -> None:
    output = output_of("a", "error", error=error)
    for choice in (choice_of(kind).complete(output), choice_of(kind).chunks(delta_of("a", output))[-1]):
        assert choice.get("error", "absent") == ("absent" if error is None else error)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("spec", [None, ToolCallSpec([GET], format=HERMES), ToolCallSpec([GET], named="get")])
@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_has_the_index_of_its_output(
    kind: type[CompletionChoice], spec: ToolCallSpec | None, index: int
) -> None:
    output = output_of("a" + CALL + "b", reasoning="so")
    assert choice_of(kind, index, tool_calls=spec).complete(output)["index"] == index
    streaming = choice_of(kind, index, tool_calls=spec)
    chunks = [
        chunk
        for delta in (delta_of(reasoning="so"), delta_of("a" + CALL), delta_of("b"), delta_of("", output))
        for chunk in streaming.chunks(delta)
    ]
    assert len(chunks) > 2
    assert {chunk["index"] for chunk in chunks} == {index}


def test_every_streamed_choice_begins_with_its_own_role() -> None:
    first, second = choice_of(ChatChoice), choice_of(ChatChoice, 1)
    begun = {"role": "assistant", "content": ""}
    assert [chunk["delta"] for chunk in first.chunks(delta_of("a"))] == [begun | {"content": "a"}]
    assert [chunk["delta"] for chunk in second.chunks(delta_of(reasoning="b"))] == [
        begun | {"reasoning_content": "b", "reasoning": "b"}
    ]
    assert [chunk["delta"] for chunk in first.chunks(delta_of("c"))] == [{"content": "c"}]
    assert [chunk["delta"] for chunk in second.chunks(delta_of("d"))] == [{"content": "d"}]


@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_has_both_names_and_is_absent_if_empty(kind: type[CompletionChoice]) -> None:
    for reasoning in ("", "so"):
        choice = choice_of(kind).complete(output_of("a", reasoning=reasoning))
        message = choice["message"] if kind is ChatChoice else choice
        assert [message.get(name, "") for name in ("reasoning_content", "reasoning")] == [reasoning] * 2
        assert ("reasoning" in message) == ("reasoning_content" in message) == bool(reasoning)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_text_that_ends_like_the_beginning_of_a_call_is_complete(form: Any, streamed: bool) -> None:
    spec = ToolCallSpec([GET], format=form)
    [trigger] = form.triggers([])
    for size in range(1, len(trigger)):
        text = "so: " + trigger[:size]
        choice = choice_of(ChatChoice, tool_calls=spec)
        if streamed:
            chunks = [*choice.chunks(delta_of(text)), *choice.chunks(delta_of("", output_of(text)))]
            content = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        else:
            content = choice.complete(output_of(text))["message"]["content"]
        assert content == text


LOGPROBS = [
    TokenLogprobs(1, -0.5, ((1, -0.5), (2, -1.5))),
    TokenLogprobs(2, float("-inf"), ((1, -0.25),)),
    TokenLogprobs(3, -9999.0, ()),
    TokenLogprobs(4, -9998.5, ()),
]
FINITE = [-0.5, -9999.0, -9999.0, -9998.5]


def test_completion_logprobs_are_finite_and_text_offsets_count_characters() -> None:
    output = output_of("abé日本", logprobs=LOGPROBS)
    expected = {
        "tokens": ["a", "bé", "", "日本"],
        "token_logprobs": FINITE,
        "top_logprobs": [{"a": -0.5, "bé": -1.5}, {"a": -0.25}, {}, {}],
        "text_offset": [0, 1, 3, 3],
    }
    assert choice_of(CompletionChoice).complete(output)["logprobs"] == expected
    streaming = choice_of(CompletionChoice)
    parts = [
        *streaming.chunks(delta_of("a", logprobs=LOGPROBS[:1])),
        *streaming.chunks(delta_of("", logprobs=LOGPROBS[1:2])),  # no text yet: its logprobs come with the next text
        *streaming.chunks(delta_of("bé日本", output, logprobs=LOGPROBS[2:])),
    ]
    assert len(parts) == 2
    joined = {name: [each for part in parts for each in part["logprobs"][name]] for name in expected}
    assert joined == expected


def test_chat_logprobs_have_text_and_bytes_of_every_alternative() -> None:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = TOKEN_TEXTS[token]
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    expected = [
        entry(each.token, logprob) | {"top_logprobs": [entry(*top) for top in each.top]}
        for each, logprob in zip(LOGPROBS, FINITE, strict=True)
    ]
    output = output_of("abé日本", logprobs=LOGPROBS)
    assert choice_of(ChatChoice).complete(output)["logprobs"] == {"content": expected, "refusal": None}


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_none_where_the_request_asked_for_none(kind: type[CompletionChoice]) -> None:
    assert choice_of(kind).complete(output_of("a"))["logprobs"] is None
    assert [chunk["logprobs"] for chunk in choice_of(kind).chunks(delta_of("a"))] == [None]


@pytest.mark.parametrize("kind", KINDS)
def test_token_ids_wait_for_text_and_are_absent_unless_requested(kind: type[CompletionChoice]) -> None:
    output = output_of("ab", token_ids=[1, 3, 2])
    deltas = [delta_of("a", tokens=[1]), delta_of("", tokens=[3]), delta_of("b", tokens=[2]), delta_of("", output)]
    asked = choice_of(kind, return_token_ids=True)
    chunks = [chunk for delta in deltas for chunk in asked.chunks(delta)]
    assert [chunk["token_ids"] for chunk in chunks] == [[1], [3, 2], []]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [None, None, [5, 6, 7]]
    complete = choice_of(kind, return_token_ids=True).complete(output)
    assert (complete["token_ids"], complete["prompt_token_ids"]) == ([1, 3, 2], [5, 6, 7])
    plain = choice_of(kind)
    for chunk in (*(chunk for delta in deltas for chunk in plain.chunks(delta)), choice_of(kind).complete(output)):
        assert not {"token_ids", "prompt_token_ids"} & set(chunk)


def test_prompt_logprobs_begin_with_none_and_include_the_token_itself() -> None:
    prompt = [TokenLogprobs(4, float("-inf"), ((1, -0.5), (2, -1.5))), TokenLogprobs(1, -0.5, ((1, -0.5),))]
    assert choice_of(CompletionChoice).complete(output_of("a", prompt_logprobs=prompt))["prompt_logprobs"] == [
        None,
        {
            "1": {"logprob": -0.5, "decoded_token": "a"},
            "2": {"logprob": -1.5, "decoded_token": "bé"},
            "4": {"logprob": -9999.0, "decoded_token": "日本"},
        },
        {"1": {"logprob": -0.5, "decoded_token": "a"}},
    ]


OUTPUTS = [
    output_of(
        "a",
        token_ids=[1],
        reasoning_tokens=0,
        num_cached_tokens=2,
        speculation=Speculation(
            2, num_spec_steps=1, num_draft_tokens=2, num_accepted_draft_tokens=1, acceptance_histogram=[0, 1, 0]
        ),
    ),
    output_of(
        "bc",
        "length",
        token_ids=[2, 3, 4],
        reasoning_tokens=3,
        num_cached_tokens=3,
        index=1,
        speculation=Speculation(
            2, num_spec_steps=3, num_draft_tokens=6, num_accepted_draft_tokens=5, acceptance_histogram=[0, 1, 2]
        ),
    ),
    output_of("d", token_ids=[1, 1], reasoning_tokens=4, index=2),
]
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 6,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 7},
}
METRICS = {
    "speculative_decoding": {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.75,
        "acceptance_histogram": [0, 2, 2],
        "num_spec_steps": 4,
        "num_draft_tokens": 8,
        "num_accepted_draft_tokens": 6,
        "num_spec_tokens": 2,
    },
}


def request_of(n: int, **options: bool) -> CompletionRequest:
    return CompletionRequest(
        model=None, prompt="x", params=SamplingParams(n=n), stream=True, stream_options=StreamOptions(**options)
    )


@given(st.lists(st.tuples(st.text(min_size=1), st.booleans()), min_size=1), st.booleans())
@pytest.mark.parametrize("kind", [CompletionFormatter, ChatFormatter])
def test_a_chunk_that_differs_in_its_text_alone_has_the_same_json(
    kind: type[CompletionFormatter], texts: list[tuple[str, bool]], include_usage: bool
) -> None:
    request = replace(request_of(2, include_usage=include_usage), request_id="same")
    quick, slow = kind(request, "m", TOKENIZER), kind(request, "m", TOKENIZER)
    quick._head = slow._head  # the clock may have moved on
    for formatter in (quick, slow):
        assert formatter.text_chunk(delta_of("first", index=1, tokens=[1])) is None
        formatter.chunks([delta_of("first", index=1, tokens=[1])], 3)
    assert quick.text_chunk(delta_of("first of another", tokens=[1])) is None
    for text, is_reasoning in texts:
        delta = delta_of("" if is_reasoning else text, index=1, reasoning=text if is_reasoning else "", tokens=[2])
        assert quick.text_chunk(delta) == encode_event(slow.chunks([delta], 3)[0])


@pytest.mark.parametrize(
    "options",
    [
        {"params": SamplingParams(logprobs=1)},
        {"return_token_ids": True},
        {"tool_calls": ToolCallSpec([GET], HERMES)},
        {"prompt_only": True},
        {"stream_options": StreamOptions(continuous_usage_stats=True)},
        {"stream_options": StreamOptions(include_token_sources=True)},
    ],
)
def test_other_chunks_differ_in_more_than_their_text(options: dict[str, Any]) -> None:
    formatter = ChatFormatter(replace(request_of(1), **options), "m", TOKENIZER)
    formatter.chunks([delta_of("first ", tokens=[1])], 3)
    assert formatter.text_chunk(delta_of("text", tokens=[2])) is None


def test_only_text_or_reasoning_without_an_end_is_a_chunk_of_text_alone() -> None:
    formatter = ChatFormatter(request_of(1), "m", TOKENIZER)
    formatter.chunks([delta_of("first")], 3)
    ended = delta_of("text", output_of("text"))
    for delta in (delta_of("text", reasoning="more"), delta_of(tokens=[2]), ended):
        assert formatter.text_chunk(delta) is None
    hidden = ChatFormatter(replace(request_of(1), include_reasoning=False), "m", TOKENIZER)
    hidden.chunks([delta_of("first")], 3)
    assert hidden.text_chunk(delta_of(reasoning="hidden")) is None


def test_usage_adds_all_outputs_and_counts_the_prompt_once() -> None:
    assert usage_of(OUTPUTS) == USAGE
    second = replace(OUTPUTS[1], index=0)
    assert usage_of([second])["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert usage_of([second])["prompt_tokens_details"] == {"cached_tokens": 3}


def test_usage_counts_every_prompt_of_a_list() -> None:
    usage = usage_of([*OUTPUTS, replace(OUTPUTS[1], index=0)])
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (6, {"cached_tokens": 5})
    assert usage["completion_tokens"] == USAGE["completion_tokens"] + 3


@pytest.mark.parametrize(
    ("formatter", "objects", "prefix"),
    [
        (CompletionFormatter, ("text_completion", "text_completion"), "cmpl-"),
        (ChatFormatter, ("chat.completion", "chat.completion.chunk"), "chatcmpl-"),
    ],
)
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("continuous", [True, False])
def test_a_stream_has_exactly_the_requested_usage(
    formatter: type[CompletionFormatter], objects: tuple[str, str], prefix: str, include: bool, continuous: bool
) -> None:
    """The outputs end in another order than that of their indices."""
    choices = formatter(request_of(3, include_usage=include, continuous_usage_stats=continuous), "m", TOKENIZER)
    parts = [
        [delta_of("bc", tokens=[2, 3], index=1), delta_of("a", tokens=[1])],
        [delta_of("d", OUTPUTS[2], tokens=[1, 1], index=2)],
        [delta_of("", OUTPUTS[1], tokens=[4], index=1)],
        [delta_of("", OUTPUTS[0])],
    ]
    chunks, finished = [], []
    for part in parts:
        chunks += choices.chunks(part, 3)
        finished.append(choices.finished)
    assert finished == [False, False, False, True]
    content, last = (chunks[:-1], chunks[-1]) if include else (chunks, None)
    assert [chunk["choices"][0]["index"] for chunk in content] == [1, 0, 2, 1, 0]
    assert all(len(chunk["choices"]) == 1 for chunk in content)
    if continuous:
        counted = [chunk["usage"]["completion_tokens"] for chunk in content]
        assert counted == [2, 3, 5, 6, 6]
        assert [chunk["usage"]["total_tokens"] for chunk in content] == [3 + each for each in counted]
        assert content[-1]["usage"] == USAGE
    else:
        assert [chunk.get("usage", "absent") for chunk in content] == [None if include else "absent"] * 5
    if last is not None:
        assert (last["choices"], last["usage"], last["metrics"]) == ([], USAGE, METRICS)
    assert {chunk["object"] for chunk in chunks} == {objects[1]}
    assert {chunk["model"] for chunk in chunks} == {"m"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith(prefix)


def test_a_response_has_one_choice_per_output_in_order() -> None:
    complete = CompletionFormatter(request_of(3), "m", TOKENIZER).complete(OUTPUTS)
    assert [(each["index"], each["text"]) for each in complete["choices"]] == [(0, "a"), (1, "bc"), (2, "d")]
    assert [each["finish_reason"] for each in complete["choices"]] == ["stop", "length", "stop"]
    assert (complete["object"], complete["usage"]) == ("text_completion", USAGE)
    chat = ChatFormatter(request_of(3), "m", TOKENIZER).complete(OUTPUTS)
    assert [(each["index"], each["message"]["content"]) for each in chat["choices"]] == [(0, "a"), (1, "bc"), (2, "d")]
    assert chat["object"] == "chat.completion"
