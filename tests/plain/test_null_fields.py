"""A field of null is as one left out, in every object of a body, and the type of an object decides its fields."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.servers.openai.request_body import CompletionRequest
from tests.plain.test_changed_fields import BODIES, IMAGE
from tests.plain.test_openai_requests import CHAT_TEMPLATES

PLACES = {"response": "input", "message": "messages"}  # a chat's message is the template's, nulls included
URL = "https://example.com/a.png"
SOURCE = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """The objects with a type or a role in a body."""
    if isinstance(value, dict) and {"type", "role"} & value.keys():
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(inner)


def parsed(name: str, body: dict[str, Any]) -> CompletionRequest:
    request: CompletionRequest = BODIES[name][0](copy.deepcopy(body), CHAT_TEMPLATES)
    return request


@pytest.mark.parametrize("name", PLACES)
def test_a_null_field_of_an_object_is_as_one_left_out(name: str) -> None:
    body = copy.deepcopy(BODIES[name][1])
    plain = parsed(name, body)
    for changed_object in objects(body[PLACES[name]]):
        changed_object["unknown_field"] = None
        changed = parsed(name, body)
        assert (changed.prompts, changed.params) == (plain.prompts, plain.params), changed_object
        del changed_object["unknown_field"]


def image_of(source: dict[str, Any]) -> str:
    block = {"type": "image", "source": source}
    request = parsed("message", {"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]})
    url: str = request.prompts[0].messages[0]["content"][0]["image_url"]["url"]  # type: ignore[union-attr]
    return url


def test_the_type_of_a_source_decides_where_its_image_is() -> None:
    assert image_of(SOURCE | {"url": URL}) == image_of(SOURCE) == IMAGE
    assert image_of({"type": "url", "url": URL, "data": "aGVsbG8="}) == URL
    for wrong in ({"type": "file", "url": URL}, {"url": URL}, {"type": None, "data": "aGVsbG8="}):
        with pytest.raises(BadRequest, match=r"messages\.0\.content\.0\.source: must have type base64, media_type"):
            image_of(wrong)
