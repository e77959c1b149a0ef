"""White space around calls is no text, in the answers of all protocols that have calls."""

from typing import Any

import pytest

from tandemrt import SamplingParams
from tandemrt.runtime.servers.anthropic.answer import MessageFormatter
from tandemrt.runtime.servers.openai.formatters import ChatFormatter
from tandemrt.runtime.servers.openai.request_body import CompletionRequest
from tandemrt.runtime.servers.openai.responses_answer import ResponsesFormatter
from tandemrt.runtime.servers.openai.tools import ToolCallSpec
from tests.plain.test_openai_choices import CALL, GET, HERMES, TOKENIZER, delta_of, output_of

CASES = [
    (f"\n\n{CALL}\n{CALL}", ["call", "call"]),
    (f"\n\n{CALL}\n{CALL}\n\n", ["call", "call"]),
    (f" \n{CALL}\n\nDone.\n", ["call", "\n\nDone.\n"]),
    (f"I look.\n\n{CALL}", ["I look.\n\n", "call"]),
    ("\n\nNo call.\n", ["\n\nNo call.\n"]),
    ("\n\n", []),
]


def formatter(kind: Any) -> Any:
    spec = ToolCallSpec([GET], format=HERMES)
    request = CompletionRequest(prompt="", params=SamplingParams(), stream=False, model=None, tool_calls=spec)
    return kind(request, "model", TOKENIZER)


def message_parts(answer: Any) -> list[str]:
    return [block["text"] if block["type"] == "text" else "call" for block in answer["content"]]


def response_parts(answer: Any) -> list[str]:
    return [item["content"][0]["text"] if item["type"] == "message" else "call" for item in answer["output"]]


@pytest.mark.parametrize(("text", "parts"), CASES)
def test_a_complete_answer_has_no_blank_text(text: str, parts: list[str]) -> None:
    output = output_of(text, reasoning="so")
    message = formatter(ChatFormatter).complete([output])["choices"][0]["message"]
    texts = [part for part in parts if part != "call"]
    assert message["content"] == ("".join(texts) if texts else None)
    assert len(message.get("tool_calls", [])) == parts.count("call")
    assert message_parts(formatter(MessageFormatter).complete([output]))[1:] == parts
    assert response_parts(formatter(ResponsesFormatter).complete([output]))[1:] == parts


@pytest.mark.parametrize(("text", "parts"), CASES)
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_a_stream_has_no_blank_text(text: str, parts: list[str], size: int) -> None:
    deltas = [delta_of(text[at : at + size]) for at in range(0, len(text), size)]
    deltas.append(delta_of("", output_of(text)))
    chunks = [
        chunk["choices"][0]["delta"]
        for formatted in [formatter(ChatFormatter)]
        for delta in deltas
        for chunk in formatted.chunks([delta], 1)
    ]
    assert "".join(chunk.get("content", "") for chunk in chunks) == "".join(part for part in parts if part != "call")
    for kind, begins in ((MessageFormatter, "content_block_start"), (ResponsesFormatter, "response.output_item.added")):
        formatted = formatter(kind)
        events = [event for delta in deltas for event in formatted.chunks([delta], 1)]
        blocks = [event.get("content_block", event.get("item")) for event in events if event["type"] == begins]
        called = [block["type"] in ("tool_use", "function_call") for block in blocks]
        assert called == [part == "call" for part in parts]
