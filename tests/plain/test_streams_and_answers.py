"""A stream of every protocol says what its complete answer says, however its outputs end and mix."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from tandemrt import SamplingParams
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.request import RequestOutput
from tandemrt.runtime.servers.anthropic.answer import MessageFormatter
from tandemrt.runtime.servers.openai import formatters
from tandemrt.runtime.servers.openai.formatters import ChatFormatter, CompletionFormatter
from tandemrt.runtime.servers.openai.request_body import CompletionRequest
from tandemrt.runtime.servers.openai.responses_answer import ResponsesFormatter
from tandemrt.runtime.servers.openai.token_texts import TokenText
from tandemrt.runtime.servers.openai.tools import ToolCallSpec
from tandemrt.runtime.servers.request_stream import OutputDelta
from tests.plain.test_openai_choices import CALL, GET, TOKENIZER, output_of
from tests.plain.tool_call_templates import HERMES

SPEC = ToolCallSpec([GET], format=HERMES)
PROMPT = "Two"
ROLES = ("reasoning", "answer")


def token_text(_tokenizer: object, token: int, *, first: bool = False) -> TokenText:
    text = f" t{token}"
    return TokenText(text[1:] if first else text, text.encode())


Part = tuple[str, str, int]  # reasoning, text, tokens
_TOKENS = st.integers(0, 2)
_TEXTS = st.sampled_from(["", "a", " ", CALL, CALL[:3], CALL[:14], f"b{CALL}"])


def ordered(thought: list[Part], said: list[Part], *, late: bool) -> list[Part]:
    """The reasoning comes first. A ``late`` reader gets its end and the beginning of the answer at once.

    No text comes before its first token.
    """
    parts = [*thought, *said]
    if late and thought:
        (reasoning, _, one), (_, text, other) = thought[-1], said[0]
        parts = [*thought[:-1], (reasoning, text, one + other), *said[1:]]
    (reasoning, text, count), *others = parts
    return [(reasoning, text, max(1, count)), *others]


PARTS = st.builds(
    ordered,
    st.lists(st.tuples(st.sampled_from(["", "so "]), st.just(""), _TOKENS), max_size=2),
    st.lists(st.tuples(st.just(""), _TEXTS, _TOKENS), min_size=1, max_size=3),
    late=st.booleans(),
)
FINISH = st.sampled_from(
    [("stop", None, None), ("stop", "half", None), ("length", None, None), ("constraint", None, "E")]
)


def deltas_of(
    index: int, parts: Sequence[Part], finish: tuple[str, Any, str | None], *, logprobs: bool
) -> list[OutputDelta]:
    """The deltas of one output; the last has the output."""
    deltas, token = list[OutputDelta](), 10 * index
    for reasoning, text, count in parts:
        ids = [*range(token, token + count)]
        listed = [TokenLogprobs(each, -each / 8, ((each, -each / 8), (each + 1, -9.0))) for each in ids]
        sources = [{"token": each, "role": ROLES[bool(text)]} for each in ids]
        deltas.append(OutputDelta(index, text, reasoning, ids, listed if logprobs else [], None, sources))
        token += count
    reason, stopped_by, error = finish
    output = output_of(
        "".join(delta.text for delta in deltas),
        reason,
        index=index,
        reasoning="".join(delta.reasoning for delta in deltas),
        token_ids=[each for delta in deltas for each in delta.token_ids],
        logprobs=[each for delta in deltas for each in delta.logprobs] if logprobs else None,
        reasoning_tokens=len(parts) + index,
        num_cached_tokens=1,
        seed=7 + index,
        stop_reason=stopped_by,
        error=error,
    )
    return [*deltas[:-1], replace(deltas[-1], output=output)]


def outputs_of(deltas: Sequence[OutputDelta]) -> list[RequestOutput]:
    return sorted((delta.output for delta in deltas if delta.output is not None), key=lambda output: output.index)


_LAST = ("index", "role", "finish_reason", "native_finish_reason", "name", "id")


def joined(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Texts and lists of ``values`` after one another, calls by their index; of any other value, the last."""
    whole: dict[str, Any] = {}
    for name in dict.fromkeys(name for value in values for name in value):
        present = [value[name] for value in values if value.get(name) is not None]
        if name == "tool_calls":
            calls = [call for each in present for call in each]
            numbers = dict.fromkeys(call["index"] for call in calls)
            whole[name] = [joined([call for call in calls if call["index"] == number]) for number in numbers]
        elif present and isinstance(present[0], dict):
            whole[name] = joined(present)
        elif present and isinstance(present[0], str) and name not in _LAST:
            whole[name] = "".join(present)
        elif present and isinstance(present[0], list):
            whole[name] = [each for part in present for each in part]
        else:
            whole[name] = present[-1] if present else None
    return whole


@given(
    outputs=st.lists(st.tuples(PARTS, FINISH), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
    chat=st.booleans(),
    tools=st.booleans(),
    logprobs=st.booleans(),
    ids=st.booleans(),
    reasoning=st.booleans(),
    echo=st.sampled_from([None, "beside the output", "alone"]),
)
def test_choices_of_a_stream_are_those_of_the_complete_answer(
    outputs: Any, order: Any, *, chat: bool, tools: bool, logprobs: bool, ids: bool, reasoning: bool, echo: str | None
) -> None:
    waiting = [deltas_of(at, parts, finish, logprobs=logprobs) for at, (parts, finish) in enumerate(outputs)]
    deltas = list[OutputDelta]()
    while any(waiting):
        deltas.append(order.choice([each for each in waiting if each]).pop(0))
    request = CompletionRequest(
        model=None,
        prompt=PROMPT,
        params=SamplingParams(n=len(outputs), logprobs=1 if logprobs else None),
        stream=True,
        tool_calls=SPEC if tools and chat else None,
        return_token_ids=ids,
        include_reasoning=reasoning,
        echo=echo is not None and not chat and not logprobs,
        prompt_only=echo == "alone" and not chat and not logprobs,
    )
    kind = ChatFormatter if chat else CompletionFormatter
    with patch.object(formatters, "token_text", token_text):
        complete = kind(request, "m", TOKENIZER).complete(outputs_of(deltas))
        stream = kind(request, "m", TOKENIZER)
        chunks = [chunk for delta in deltas for chunk in stream.chunks([delta], 3)]
    assert stream.finished
    for index, choice in enumerate(complete["choices"]):
        parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        sources = [each for part in parts for each in part.pop("token_sources", ())]
        asked = [each for delta in deltas if delta.index == index for each in delta.sources]
        kept = [each for each in asked if reasoning or each["role"] == "answer"]
        assert sources == ([] if request.prompt_only else kept)
        whole = joined(parts)
        if chat:
            said, message = whole.pop("delta"), choice.pop("message")
            calls = [each["function"] for each in said.pop("tool_calls", ())]
            assert calls == [each["function"] for each in message.pop("tool_calls", ())]
            whole |= {"refusal": None, "content": None, **said}
            choice |= message
        assert filled(whole) == filled(choice)


def filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """What says something: neither null nor empty."""
    inner = {name: filled(value) if isinstance(value, dict) else value for name, value in values.items()}
    return {name: value for name, value in inner.items() if value not in (None, "", [], {})}


@example([("so ", "", 1), ("", CALL[:14], 1)], ("length", None, None), True)
@given(PARTS, FINISH, st.booleans())
def test_events_of_a_response_lead_to_the_complete_one(parts: Any, finish: Any, tools: bool) -> None:
    deltas = deltas_of(0, parts, finish, logprobs=False)
    request = CompletionRequest(
        model=None, prompt=PROMPT, params=SamplingParams(), stream=True, tool_calls=SPEC if tools else None
    )
    complete = ResponsesFormatter(request, "m", TOKENIZER).complete(outputs_of(deltas))
    stream = ResponsesFormatter(request, "m", TOKENIZER)
    events = [event for delta in deltas for event in stream.chunks([delta], 3)]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    done = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    last = events[-1]["response"]
    assert [*done] == [*range(len(last["output"]))]
    for index, (ours, theirs) in enumerate(zip(last["output"], complete["output"], strict=True)):
        for name in ("id", "call_id"):
            ours.pop(name, None)
            theirs.pop(name, None)
        text = ours["arguments"] if "arguments" in ours else ours["content"][0]["text"]
        assert texts.get(index, "") == text
    cut = last["status"] == "incomplete"  # only the last item is
    states = [item["status"] == "incomplete" for item in last["output"]]
    thought = any(delta.text for delta in deltas)  # text that is no item yet ends the reasoning too
    ended = [item["type"] == "reasoning" and thought for item in last["output"]]
    assert states == [
        cut and item is last["output"][-1] and not end for item, end in zip(last["output"], ended, strict=True)
    ]
    assert cut == (deltas[-1].output.finish_reason != "stop")
    for name in ("id", "created_at"):
        del last[name], complete[name]
    assert last == complete
    assert events[-1]["type"] == f"response.{complete['status']}"


@given(PARTS, FINISH, st.booleans())
def test_events_of_a_message_lead_to_the_complete_one(parts: Any, finish: Any, tools: bool) -> None:
    deltas = deltas_of(0, parts, finish, logprobs=False)
    request = CompletionRequest(
        model=None, prompt=PROMPT, params=SamplingParams(), stream=True, tool_calls=SPEC if tools else None
    )
    complete = MessageFormatter(request, "m", TOKENIZER).complete(outputs_of(deltas))
    stream = MessageFormatter(request, "m", TOKENIZER)
    start, *events, delta, stop = [event for each in deltas for event in stream.chunks([each], 3)]
    assert (start["type"], stop["type"]) == ("message_start", "message_stop")
    blocks = list[dict[str, Any]]()
    open_blocks = set[int]()
    for event in events:
        index = event["index"]
        match event["type"]:
            case "content_block_start":
                assert index == len(blocks)
                assert not open_blocks
                open_blocks.add(index)
                blocks.append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                assert index in open_blocks
                ((name, text),) = [(name, text) for name, text in event["delta"].items() if name != "type"]
                name = "json" if name == "partial_json" else name
                blocks[index][name] += text
            case "content_block_stop":
                open_blocks.remove(index)
    assert not open_blocks
    for ours, theirs in zip(blocks, complete["content"], strict=True):
        text = ours.pop("json")
        if theirs["type"] == "tool_use":
            assert text in ("{}", "")
            ours["id"] = theirs["id"]
        assert ours == theirs
    assert delta["delta"].items() <= complete.items()
    assert (delta["usage"], delta["metrics"]) == (complete["usage"], complete["metrics"])
