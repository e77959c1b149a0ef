"""Whole answers: each has the fields written here and no others, with the values of the Python API."""

import time
from typing import Any

import pytest

from tandemrt import LLM, SamplingParams, __version__
from tandemrt.runtime.requests.request import RequestOutput
from tests.openai.client import Served, events, named_events

PROMPT = "Two boxes."
USER = {"role": "user", "content": PROMPT}
SAMPLED = {"seed": 7, "thinking_token_budget": 2, "temperature": 0.5}


def whole(served: Served, path: str, body: Any = None, *, id_prefix: str = "") -> Any:
    """The answer without its id and its time, which are checked."""
    before = int(time.time())
    status, answer, headers = served.ask(path, body)
    assert (status, headers["content-type"]) == (200, "application/json"), answer
    name = answer.pop("id", "")
    assert name.startswith(id_prefix)
    assert len(name) == (len(id_prefix) + 24 if id_prefix else 0)
    for field in {"created", "created_at"} & answer.keys():
        assert before <= answer.pop(field) <= time.time()
    return answer


def output_of(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    output = llm.generate(prompt, SamplingParams(**SAMPLED | params))
    assert output.text
    assert output.finish_reason == "length"
    return output


def usage(*outputs: RequestOutput) -> dict[str, Any]:
    """OpenAI's; the outputs are of different prompts."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    tokens = sum(len(output.token_ids) for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": 0},  # the prompts are shorter than a block
        "completion_tokens_details": {"reasoning_tokens": sum(output.reasoning_tokens for output in outputs)},
    }


def ends(output: RequestOutput) -> dict[str, Any]:
    return {"native_finish_reason": "length", "stop_reason": None, "seed": output.seed}


def metrics(output: RequestOutput) -> dict[str, Any]:
    return {"speculative_decoding": output.speculation.to_json()}


def test_a_chat_completion(served: Served, llm: LLM) -> None:
    output = output_of(llm, [USER], max_tokens=6)
    texts = {"content": output.text, "reasoning_content": output.reasoning, "reasoning": output.reasoning}
    asked = {"messages": [USER], "max_tokens": 6, **SAMPLED}
    finished = {"finish_reason": "length", **ends(output)}
    assert whole(served, "/v1/chat/completions", asked, id_prefix="chatcmpl-") == {
        "model": "demo",
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "refusal": None, **texts}, "logprobs": None, **finished}
        ],
        "usage": usage(output),
        "metrics": metrics(output),
    }
    connection = served.send(
        "/v1/chat/completions", asked | {"stream": True, "stream_options": {"include_usage": True}}
    )
    chunks = list(events(connection.getresponse()))
    connection.close()
    common = {
        "id": chunks[0]["id"],
        "created": chunks[0]["created"],
        "model": "demo",
        "object": "chat.completion.chunk",
    }
    joined = dict.fromkeys(texts, "")
    for number, chunk in enumerate(chunks[:-1]):
        [choice] = chunk.pop("choices")
        delta, last = choice.pop("delta"), number == len(chunks) - 2
        assert delta.pop("role", None) == (None if number else "assistant")
        for name, text in delta.items():
            joined[name] += text
        assert choice == {"index": 0, "logprobs": None, "finish_reason": None} | (finished if last else {})
        assert chunk == common | {"usage": None}
    assert joined == texts
    assert chunks[-1] == common | {"choices": [], "usage": usage(output), "metrics": metrics(output)}


def test_completions_of_two_prompts(served: Served, llm: LLM) -> None:
    prompts = [PROMPT, "Six crates of"]
    outputs = [output_of(llm, prompt, max_tokens=3, logprobs=1) for prompt in prompts]
    asked = {"prompt": prompts, "max_tokens": 3, "logprobs": 1, "return_token_ids": True, **SAMPLED}
    answer = whole(served, "/v1/completions", asked, id_prefix="cmpl-")
    assert answer.pop("metrics")["speculative_decoding"]["num_spec_steps"] > 0
    logprobs = [choice.pop("logprobs") for choice in answer["choices"]]
    assert answer == {
        "model": "demo",
        "object": "text_completion",
        "choices": [
            {
                "index": index,
                "text": output.text,
                "finish_reason": "length",
                "token_ids": output.token_ids,
                "prompt_token_ids": output.prompt_token_ids,
                **ends(output),
            }
            for index, output in enumerate(outputs)
        ],
        "usage": usage(*outputs),
    }
    for output, described in zip(outputs, logprobs, strict=True):
        assert output.logprobs is not None
        assert "".join(described["tokens"]) == output.text
        assert described["token_logprobs"] == [each.logprob for each in output.logprobs]
        assert [list(top.values()) for top in described["top_logprobs"]] == [
            [logprob for _, logprob in each.top] for each in output.logprobs
        ]
        assert described["text_offset"] == [
            len("".join(described["tokens"][:index])) for index in range(len(output.token_ids))
        ]


def test_a_response(served: Served, llm: LLM) -> None:
    output = output_of(llm, [USER], max_tokens=6)
    asked = {"input": PROMPT, "max_output_tokens": 6, "metadata": {"a": "b"}, "user": "u", **SAMPLED}
    answer = whole(served, "/v1/responses", asked, id_prefix="resp_")
    ids = [item.pop("id") for item in answer["output"]]
    assert [name[:3] for name in ids] == ["rs_", "msg"]
    total = len(output.prompt_token_ids) + len(output.token_ids)
    assert answer == {
        "object": "response",
        "model": "demo",
        "instructions": None,
        "max_output_tokens": 6,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "user": "u",
        "status": "incomplete",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [
            {
                "status": "completed",
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": output.reasoning}],
            },
            {
                "status": "incomplete",
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": output.text, "annotations": [], "logprobs": []}],
            },
        ],
        "usage": {
            "input_tokens": len(output.prompt_token_ids),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(output.token_ids),
            "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
            "total_tokens": total,
        },
        "metrics": metrics(output),
        **ends(output),
    }


def test_a_message(served: Served, llm: LLM) -> None:
    output = output_of(llm, [USER], max_tokens=6)
    asked = {"messages": [USER], "max_tokens": 6, **SAMPLED}
    read = {"input_tokens": len(output.prompt_token_ids), "output_tokens": len(output.token_ids)}
    details = {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    thinking = {"output_tokens_details": {"thinking_tokens": output.reasoning_tokens}}
    end = {"stop_reason": "max_tokens", "stop_sequence": None, "native_finish_reason": "length", "seed": output.seed}
    begin = {"type": "message", "role": "assistant", "model": "demo"}
    assert whole(served, "/v1/messages", asked, id_prefix="msg_") == {
        **begin,
        "content": [
            {"type": "thinking", "thinking": output.reasoning, "signature": ""},
            {"type": "text", "text": output.text},
        ],
        "usage": read | details | thinking,
        "metrics": metrics(output),
        **end,
    }
    (first, start), *between, (last, done), stop = named_events(served, "/v1/messages", asked | {"stream": True})
    assert start["message"].pop("id").startswith("msg_")
    message = {**begin, "content": [], "stop_reason": None, "stop_sequence": None, "usage": read | {"output_tokens": 0}}
    assert (first, start) == ("message_start", {"type": "message_start", "message": message})
    delta = {"type": "message_delta", "delta": end, "usage": read | details | thinking, "metrics": metrics(output)}
    assert (last, done, stop) == ("message_delta", delta, ("message_stop", {"type": "message_stop"}))
    joined = ["", ""]
    for name, event in between:
        assert name == event["type"]
        if name == "content_block_delta":
            kind = ("thinking", "text")[event["index"]]
            assert event["delta"].keys() == {"type", kind}
            assert event["delta"]["type"] == f"{kind}_delta"
            joined[event["index"]] += event["delta"][kind]
    assert joined == [output.reasoning, output.text]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/messages/count_tokens", {"messages": [USER]}, {"input_tokens": 18}),
        ("/version", None, {"version": __version__}),
        ("/health", None, {"status": "ok", "closed": []}),
        (
            "/tokenize",
            {"prompt": PROMPT},
            {"count": 5, "max_model_len": 512, "tokens": [51, 86, 78, 816, 13], "token_strs": None},
        ),
        ("/detokenize", {"tokens": [51, 86, 78, 816, 13]}, {"prompt": PROMPT}),
    ],
)
def test_a_small_answer(served: Served, path: str, body: Any, expected: dict[str, Any]) -> None:
    assert whole(served, path, body) == expected
