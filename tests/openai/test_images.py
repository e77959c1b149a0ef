"""Images in requests to the OpenAI server."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.servers.http.app import Models, create_app
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.makers import tiny_vision, write_recipe


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("vision")
    recipe = write_recipe(folder / "vision.toml", target=tiny_vision(folder / "target"), length=200)
    with (
        LLM(build(Recipe.load(recipe), folder / "bundle").folder, prefix_caching=False) as llm,
        TestClient(create_app(Models({"vision": llm}, 0), ServerConfig())) as client,
    ):
        yield client


def chat(http: TestClient, url: str) -> Any:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    return http.post("/v1/chat/completions", json=body)


def data_url(colour: str, size: tuple[int, int] = (40, 32)) -> str:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_an_image_is_read_and_its_tokens_are_counted(http: TestClient) -> None:
    answers = [chat(http, data_url(colour)) for colour in ("red", "blue", "red")]
    assert [answer.status_code for answer in answers] == [200] * 3
    texts = [answer.json()["choices"][0]["message"] for answer in answers]
    assert texts[0] == texts[2] != texts[1]
    smaller = chat(http, data_url("red", (16, 16)))
    counts = [answer.json()["usage"]["prompt_tokens"] for answer in (answers[0], smaller)]
    assert counts[0] - counts[1] == 5 * 4 - 2 * 2


def test_every_api_reads_an_image_alike(http: TestClient) -> None:
    url = data_url("red")
    media, _, data = url.removeprefix("data:").partition(";base64,")
    common = {"model": "vision", "temperature": 0}
    text = {"type": "input_text", "text": "?"}
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}, text]}]
    responses = http.post("/v1/responses", json={**common, "input": items, "max_output_tokens": 8}).json()
    image = {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}
    blocks = [{"role": "user", "content": [image, {"type": "text", "text": "?"}]}]
    messages = http.post("/v1/messages", json={**common, "messages": blocks, "max_tokens": 8}).json()
    counted = http.post("/v1/messages/count_tokens", json={"model": "vision", "messages": blocks}).json()
    first = chat(http, url).json()
    prompt_tokens = first["usage"]["prompt_tokens"]
    assert [usage["input_tokens"] for usage in (responses["usage"], messages["usage"], counted)] == [prompt_tokens] * 3
    message = first["choices"][0]["message"]
    expected = (message.get("reasoning_content") or "") + (message["content"] or "")
    assert expected
    parts = [part for item in responses["output"] for part in item["content"]]
    assert "".join(part["text"] for part in parts) == expected
    assert "".join(block.get("thinking", "") + block.get("text", "") for block in messages["content"]) == expected


def test_the_result_of_a_tool_may_be_an_image(http: TestClient) -> None:
    data = data_url("red").partition(",")[2]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "seen:"}, image]}
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [call]}]
    body = {"model": "vision", "max_tokens": 4, "messages": [*turns, {"role": "user", "content": [result]}]}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://127.0.0.1/a.png", "are not fetched"),
        ("data:image/png;base64,aGVsbG8=", "must be a PNG, JPEG, WEBP, GIF file"),
        (None, "at most 50000000 pixels"),
    ],
)
def test_a_bad_image_is_the_clients_error(http: TestClient, url: str | None, reason: str) -> None:
    answer = chat(http, url or data_url("red", (9000, 9000)))
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
