"""Invalid requests are refused with the name of the field, in OpenAI's form, without an effect on others."""

import gc
import json
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import openai
import pytest

from tandemrt import SamplingParams, StreamOutput
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.grammars import xgrammar_library
from tandemrt.runtime.requests.prompt import Chat
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.openai.client import EXAMPLES, Served, asking, endless, events
from tests.openai.conftest import serving
from tests.waiting import PATIENCE_S, eventually

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}

LISTED = {"type": "object", "properties": {"a": {"type": "array", "contains": {"const": 1}}}}
CONTAINS = {"type": "function", "function": {"name": "f", "parameters": LISTED}}


def refused(served: Served, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    status, answer, _ = served.ask(path, body)
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert len(answer["error"]["message"]) < 2000
    return status, answer["error"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperatur": 1}, "temperatur", "is no field of this endpoint (did you mean 'temperature'?), received 1"),
        ({"temperature": 101}, "temperature", "must be at most 100"),
        ({"temperature": "1"}, "temperature", "must be a number; got '1'"),
        ({"guided_json": {}}, "guided_json", 'received {}; send structured_outputs {"json": ...}'),
        ({"functions": []}, "functions", "is no field of this endpoint, received []; send tools"),
        ({"enable_thinking": False}, "enable_thinking", 'send chat_template_kwargs {"enable_thinking": ...}'),
        ({"metadata": {"a": 1}}, "metadata.a", "must be a valid string"),
        ({"store": "yes"}, "store", "must be a valid boolean"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"max_tokens": 10**6}, "max_tokens", "This model's maximum context length is 512 tokens. However, the"),
        ({"max_completion_tokens": 7}, "max_completion_tokens", "is an alias of max_tokens, received 7 and 2"),
        ({"n": 0}, "n", "must be at least 1"),
        ({"n": 129}, "n", "must be at most 128"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be at most 20"),
        ({"logprobs": 3}, "logprobs", "must be true or false in a chat, received 3"),
        ({"top_logprobs": 3}, "top_logprobs", "must come with logprobs true, received 3"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort",
            "given twice, received 'low' and 'high' in chat_template_kwargs",
        ),
        ({"stream": 1}, "stream", "must be a valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "must come with stream true"),
        ({"stream": True, "stream_options": {"usage": 1}}, "stream_options", "unknown key 'usage'"),
        ({"seed": 2**65}, "seed", "must be less than"),
        ({"stop": ["x"] * 300}, "stop", "at most 256 strings"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "token ids must be in 0.."),
        ({"num_draft_tokens": 9}, "num_draft_tokens", "drafts at most 4"),
        ({"user": "u" * 513}, "user", "must have at most 512 characters"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": "x"}, "messages", "must be a valid list"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "must be one of system, developer, user,"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages.0.role", "tool, function, received 'boss'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "is required and missing"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages.0.weight", "is not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0",
            "must be a part of type text",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "must be text that UTF-8 can encode"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "must come with type json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        (
            {"tools": [CONTAINS], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tools",
            "#/properties/a/contains",
        ),
        ({"temperature": 101, "response_format": {"type": "json_object"}}, "temperature", "must be at most 100"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "one",
        ),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "cannot be enforced"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_invalid_field_is_named_in_the_error(
    served: Served, fields: dict[str, Any], param: str, message: str
) -> None:
    status, error = refused(served, "/v1/chat/completions", CHAT | fields)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logprobs": False, "store": None, "user": "u" * 512},
        {"model": None, "guided_json": None},
        {"store": True, "metadata": {"job": "7"}},
    ],
)
def test_fields_with_no_effect_are_accepted(served: Served, fields: dict[str, Any]) -> None:
    assert served.ask("/v1/chat/completions", CHAT | fields)[0] == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "a b " * 600}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 10**6}]}, "messages"),
        ("chat/completions", {"messages": CHAT["messages"], "max_completion_tokens": 512}, "max_completion_tokens"),
        ("completions", {"prompt": "a b " * 600}, "prompt"),
        ("completions", {"prompt": [70] * 512}, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": 512}, "max_tokens"),
        ("responses", {"input": "a b " * 600}, "input"),
        ("responses", {"input": "a", "max_output_tokens": 512}, "max_output_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_beyond_the_context_has_openais_code(
    served: Served, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    status, error = refused(served, f"/v1/{path}", {**fields, "stream": stream})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["message"].startswith(f"{param}: This model's maximum context length is 512 tokens. However, ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "must be JSON"),
        (b'{"model": ', "must be JSON"),
        (b'{"messages": NaN}', "NaN is not a JSON number"),
        (b"[1]", "must be a JSON object, received [1]"),
        (b'{"prompt": "\xff"}', "must be UTF-8, received b'\\xff' at byte 12"),
        (b'{"a":' * 100_000, "must be JSON"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "must be JSON"),
        (b'{"\\ud800": 1}', "must be text that UTF-8 can encode"),
        (b'{"prompt": "x", "temperature": 1e400}', "1e400 is beyond the range of numbers"),
        (b'{"prompt": "x", "logit_bias": {"7": -1e999}}', "-1e999 is beyond the range of numbers"),
    ],
)
def test_a_malformed_body_is_refused(served: Served, body: bytes, message: str) -> None:
    status, error = refused(served, "/v1/completions", body)
    assert status == 400
    assert message in error["message"]


def test_unknown_models_and_paths_are_not_found(served: Served) -> None:
    status, error = refused(served, "/v1/completions", {"model": "gpt", "prompt": "x"})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    status, error = refused(served, "/v1/embeddings", {"input": "x"})
    assert (status, error["code"]) == (404, "unsupported_endpoint")
    assert "/v1/embeddings is not supported" in error["message"]
    for path in ("/redoc", "/openapi.json", "/v1/nothing"):
        assert refused(served, path, None)[0] == 404
    assert refused(served, "/v1/completions", None)[0] == 405


@pytest.mark.parametrize("model", [[], {}, 7, True, ["demo"], "gpt", ""])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": CHAT["messages"]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": CHAT["messages"]}),
        ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_a_model_of_another_type_is_refused(served: Served, path: str, fields: dict[str, Any], model: Any) -> None:
    status, answer, _ = served.ask(path, {**fields, "model": model})
    assert (status, answer["error"]["param"]) == (404 if isinstance(model, str) else 400, "model")


def test_a_body_over_the_limit_is_refused_before_it_is_read(served: Served) -> None:
    connection = served.connect()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(100 << 20))
    connection.endheaders()  # and not a byte of it
    answer = connection.getresponse()
    assert (answer.status, b"at most 4194304 bytes" in answer.read()) == (413, True)
    connection.close()


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 413), ("/v1/nothing", 404)])
def test_a_client_that_sends_a_large_body_first_reads_the_response(served: Served, path: str, status: int) -> None:
    """urllib reads nothing before it has sent all."""
    url = served.url.removesuffix("/v1") + path
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(
            urllib.request.Request(url, b" " * (20 << 20), {"Content-Type": "application/json"}), timeout=PATIENCE_S
        )
    with caught.value as answer:
        assert (answer.status, json.loads(answer.read())["error"]["type"]) == (status, "invalid_request_error")


def test_a_connection_goes_on_after_a_body_that_was_rejected(served: Served) -> None:
    with closing(served.connect()) as connection:
        for path, status in (("/v1/completions", 413), ("/version", 200)):
            connection.request(
                "GET" if status == 200 else "POST",
                path,
                b" " * (5 << 20) if status == 413 else None,
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (status, True)


def test_a_body_of_unknown_length_is_cut_off_at_the_limit(served: Served) -> None:
    connection = served.connect()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    try:
        for _ in range(100):
            connection.send(b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n")
    except OSError:
        pass  # the server has answered and hung up
    else:
        assert connection.getresponse().status == 413
    connection.close()
    assert served.ask("/health")[0] == 200


def test_a_full_queue_returns_429_with_retry_after(demo_bundle: Path) -> None:
    with (
        serving(demo_bundle, ServerConfig(port=0), RuntimeOptions(threads=1, queue_limit=1)) as short,
        ExitStack() as stack,
    ):
        holding, release = threading.Event(), threading.Event()
        stack.callback(release.set)

        def hold(_: StreamOutput) -> None:
            holding.set()
            release.wait(PATIENCE_S)

        short.llm.submit("x", SamplingParams(max_tokens=1), hold)  # no request leaves a slot or the queue meanwhile
        assert holding.wait(PATIENCE_S)
        room = short.llm.bundle.limits.batch + 1
        sent = [short.send("/v1/completions", endless(max_tokens=1)) for _ in range(room + 3)]
        for connection in sent:
            stack.callback(connection.close)
        assert eventually(lambda: short.llm.waiting >= room - 1)
        status, body, headers = short.ask("/v1/completions", endless())
        assert (status, body["error"]["type"], body["error"]["code"]) == (429, "rate_limit_error", "queue_full")
        assert headers["retry-after"] == "1"
        release.set()
        statuses = [connection.getresponse().status for connection in sent]
        assert set(statuses) == {200, 429}


def test_v1_and_metrics_require_the_api_key(demo_bundle: Path) -> None:
    with serving(demo_bundle, ServerConfig(port=0, api_key="a key à"), RuntimeOptions(threads=1)) as locked:
        posts = (
            ("/tokenize", b"no JSON"),
            ("/detokenize", b"no JSON"),
            ("/v1/completions", b"no JSON"),
            ("/v1/chat/completions", CHAT),
            ("/v1/responses", b"no JSON"),
            ("/v1/messages", b"no JSON"),
            ("/v1/messages/count_tokens", b"no JSON"),
        )
        wrong = ({}, {"Authorization": "Bearer a key"}, {"Authorization": "Basic a key à"}, {"x-api-key": "a key"})
        for path, body in (("/metrics", None), ("/version", None), ("/v1/models", None), *posts):
            for headers in wrong:
                status, error, answered = locked.ask(path, body, headers={k: v.encode() for k, v in headers.items()})
                assert (status, error["error"]["code"]) == (401, "invalid_api_key")
                assert answered["www-authenticate"] == "Bearer"
        right = {"Authorization": "Bearer a key à".encode()}
        anthropics = {"x-api-key": "a key à".encode()}
        assert locked.ask("/v1/messages", CHAT, headers=anthropics)[0] == 200
        assert locked.ask("/v1/models", headers=right)[0] == locked.ask("/metrics", headers=right)[0] == 200
        assert locked.ask("/v1/chat/completions", CHAT, headers=right)[0] == 200
        assert locked.ask("/health")[0] == 200


def test_metrics_without_the_key_are_an_option(demo_bundle: Path) -> None:
    door = ServerConfig(port=0, api_key="a key", metrics_without_key=True)
    with serving(demo_bundle, door, RuntimeOptions(threads=1)) as open_metrics:
        assert open_metrics.ask("/metrics")[0] == 200
        assert open_metrics.ask("/v1/models")[0] == 401


@pytest.mark.parametrize(
    ("form", "field", "advice"),
    [
        ({"grammar": 'root ::= "a"'}, "grammar", "'tandemrt[xgrammar]'"),
        ({"grammar": 'root ::= "a"', "engine": "xgrammar"}, "grammar", "'tandemrt[xgrammar]'"),
        ({"choice": ["a"], "engine": "xgrammar"}, "engine", "'tandemrt[xgrammar]', or leave it out"),
    ],
)
def test_an_engine_of_an_extra_that_is_not_installed_is_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any], field: str, advice: str
) -> None:
    monkeypatch.setattr(xgrammar_library, "is_installed", lambda: False)
    status, error = refused(served, "/v1/chat/completions", {**CHAT, "structured_outputs": form})
    assert (status, error["param"]) == (400, f"structured_outputs.{field}")
    assert "needs xgrammar, which is not installed on this machine: pip install '.[xgrammar]'" in error["message"]
    assert error["message"].endswith(advice)


def test_openais_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="must be at most 100"):
        client.completions.create(model="demo", prompt="x", temperature=101)
    schema = {"type": "array", "contains": {"type": "integer"}}
    with pytest.raises(openai.BadRequestError, match=r"#/contains: .* is not supported"):
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            extra_body={"structured_outputs": {"json": schema}},
        )


def test_refused_requests_do_not_affect_others(served: Served) -> None:
    alone = served.ask("/v1/chat/completions", asking(EXAMPLES[4], seed=1))[1]["choices"][0]["message"]
    stream = served.send("/v1/chat/completions", asking(EXAMPLES[4], seed=1, stream=True))
    for body in (b"", b"{", CHAT | {"n": 0}, CHAT | {"structured_outputs": {"regex": "("}}):
        assert served.ask("/v1/chat/completions", body)[0] == 400
    deltas = [chunk["choices"][0]["delta"] for chunk in events(stream.getresponse())]
    stream.close()
    assert "".join(delta.get("content", "") for delta in deltas) == alone["content"]


def test_the_prompt_of_a_refused_request_is_freed_without_a_full_garbage_collection(served: Served) -> None:
    chat = {**CHAT, "messages": [{"role": "user", "content": "y"}] * 2000 + [{"role": "user", "content": "y" * 40_000}]}
    gc.collect()
    gc.disable()
    try:
        refused(served, "/v1/chat/completions", chat)
        assert eventually(lambda: not any(type(thing) is Chat for thing in gc.get_objects()))
    finally:
        gc.enable()
