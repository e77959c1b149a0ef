"""A chat's error names the field that the client sent."""

from typing import Any

import pytest

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.servers.openai.field_names import chat_field_names, client_names, renamed

TOOLS = {"tools": []}
JSON = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({}, {}),
        ({"max_tokens": 5}, {}),
        ({"max_completion_tokens": 5}, {"max_tokens": "max_completion_tokens"}),
        ({"max_completion_tokens": 5, "max_tokens": 5}, {}),
        ({"max_completion_tokens": 5, "max_tokens": None}, {"max_tokens": "max_completion_tokens"}),
        ({"max_completion_tokens": None}, {}),
        ({"logprobs": True}, {}),
        ({"top_logprobs": 2}, {"logprobs": "top_logprobs"}),
        ({"reasoning_effort": "low"}, {"chat_template_kwargs": "reasoning_effort"}),
        ({"documents": []}, {"chat_template_kwargs": "documents"}),
        ({"documents": [], "reasoning_effort": "low"}, {}),
        ({"documents": [], "chat_template_kwargs": {}}, {}),
        (JSON, {"structured_outputs": "response_format"}),
        (TOOLS, {"structured_outputs": "tools"}),
        ({**JSON, **TOOLS}, {"structured_outputs": "response_format"}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "text"}, **TOOLS}, {"structured_outputs": "tools"}),
        ({"structured_outputs": {}, **JSON, **TOOLS}, {}),
    ],
    ids=str,
)
def test_each_field_has_the_name_that_the_client_gave_it(body: dict[str, Any], names: dict[str, str]) -> None:
    assert chat_field_names(body) == {"prompt": "messages", **names}


def test_only_the_beginnings_of_lines_are_renamed_with_the_fields_inside() -> None:
    names = {"prompt": "messages", "structured_outputs": "tools"}
    message = "prompt: too long; prompt: stays\nstructured_outputs.json: bad\nother: prompt: stays\nprompt is no field"
    expected = "messages: too long; prompt: stays\ntools: bad\nother: prompt: stays\nprompt is no field"
    assert renamed(message, names) == expected
    with pytest.raises(BadRequest, match=r"^messages: x$"), client_names(names):
        raise BadRequest("prompt: x")
    error = BadRequest("other: x")
    with pytest.raises(BadRequest, match=r"^other: x$") as caught, client_names(names):
        raise error
    assert caught.value is error
