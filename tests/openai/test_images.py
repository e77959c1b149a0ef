"""Images in requests to the OpenAI server."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.images import ImageReader, ImageSource, InWorker
from tandemrt.runtime.servers.http.app import Models, create_app
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.makers import tiny_vision, write_recipe
from tests.openai.client import Served
from tests.openai.conftest import serving
from tests.openai.test_chat_page import browser, opened, say


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("vision")
    recipe = write_recipe(folder / "vision.toml", target=tiny_vision(folder / "target"), length=200)
    with LLM(build(Recipe.load(recipe), folder / "bundle").folder, prefix_caching=False) as llm:
        yield Models({"vision": llm}, 0)


@pytest.fixture(scope="module")
def http(models: Models) -> Iterator[TestClient]:
    with TestClient(create_app(models, ServerConfig())) as client:
        yield client


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(http: TestClient, url: str) -> Any:
    content = [image_part(url), {"type": "text", "text": "?"}]
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


def test_token_counts_share_images_as_completions_do(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time to count tells a client that another one has sent an image."""
    real, salts = ImageReader.read, list[str | None]()

    def read(reader: ImageReader, image: ImageSource, in_worker: InWorker, salt: str | None = None) -> list[Any]:
        salts.append(salt)
        return real(reader, image, in_worker, salt)

    monkeypatch.setattr(ImageReader, "read", read)
    url = data_url("green")
    messages = [{"role": "user", "content": [image_part(url), {"type": "text", "text": "?"}]}]
    image = {"type": "image", "source": {"type": "url", "url": url}}
    blocks = [{"role": "user", "content": [image, {"type": "text", "text": "?"}]}]
    with TestClient(create_app(models, ServerConfig(salt_cache_by="key"))) as salted:
        for key in ("a", "b"):
            salted.headers["Authorization"] = f"Bearer {key}"
            assert chat(salted, url).status_code == 200
            assert salted.post("/tokenize", json={"messages": messages}).status_code == 200
            assert salted.post("/v1/messages/count_tokens", json={"messages": blocks}).status_code == 200
    assert None not in salts
    assert salts[0] != salts[3]
    assert salts == [salts[0]] * 3 + [salts[3]] * 3


def test_the_clients_of_every_api_send_images(http: TestClient) -> None:
    url = data_url("red")
    data = url.partition(",")[2]
    theirs: dict[str, Any] = {"api_key": "none", "http_client": http, "max_retries": 0}
    of_openai = openai.OpenAI(base_url="http://testserver/v1", **theirs)
    of_anthropic = anthropic.Anthropic(base_url="http://testserver", **theirs)
    text: dict[str, Any] = {"type": "text", "text": "?"}
    parts = [
        image_part(url),
        {"type": "image_url", "image_url": {"url": url, "detail": "original"}},
        {"type": "file", "file": {"filename": "a.png", "file_data": url}},
        {"type": "file", "file": {"filename": "a.png", "file_data": data}},
    ]
    common: Any = {"model": "vision", "extra_body": {"temperature": 0}}
    answers = []
    for part in parts:
        message: Any = {"role": "user", "content": [part, text]}
        answer: Any = of_openai.chat.completions.create(**common, messages=[message], max_tokens=8).choices[0].message
        answers.append((answer.reasoning_content or "") + (answer.content or ""))
    inputs = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_file", "filename": "a.png", "file_data": url},
        {"type": "input_file", "filename": "a.png", "file_data": data},
    ]
    for part in inputs:
        message = {"role": "user", "content": [part, {"type": "input_text", "text": "?"}]}
        output: Any = of_openai.responses.create(**common, input=[message], max_output_tokens=8).output
        answers.append("".join(part.text for item in output for part in item.content))
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    message = {"role": "user", "content": [image, text]}
    blocks: Any = of_anthropic.messages.create(**common, messages=[message], max_tokens=8).content
    answers.append("".join(block.thinking if block.type == "thinking" else block.text for block in blocks))
    assert set(answers) == {answers[0]} != {""}


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ({"file_id": "file-1"}, "file.file_id: is no field of a part of type file here"),
        (
            {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="},
            "must be a PNG, JPEG, WEBP or GIF",
        ),
        ({"file_data": "https://example.org/a.png"}, "a data URL must hold base64"),
        ({"filename": "a.png"}, "file: must hold an image"),
    ],
)
def test_a_file_that_is_no_image_is_the_clients_error(http: TestClient, file: dict[str, str], reason: str) -> None:
    content = [{"type": "file", "file": file}, {"type": "text", "text": "?"}]
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def test_the_output_of_a_function_may_be_an_image(http: TestClient) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    output = [{"type": "input_image", "image_url": data_url("red")}, {"type": "input_text", "text": "seen"}]
    items = [{"role": "user", "content": "?"}, call, {"type": "function_call_output", "call_id": "a", "output": output}]
    answer = http.post("/v1/responses", json={"model": "vision", "input": items, "max_output_tokens": 4})
    assert answer.status_code == 200, answer.text


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
        ("data:image/png;base64,aGVsbG8=", "must be a PNG, JPEG, WEBP or GIF file"),
        (None, "at most 50000000 pixels"),
    ],
)
def test_a_bad_image_is_the_clients_error(http: TestClient, url: str | None, reason: str) -> None:
    answer = chat(http, url or data_url("red", (9000, 9000)))
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("page")
    recipe = write_recipe(folder / "vision.toml", target=tiny_vision(folder / "target"), length=200)
    bundle = build(Recipe.load(recipe), folder / "bundle").folder
    with serving({"vision": bundle}, ServerConfig(port=0), RuntimeOptions(threads=1)) as running:
        yield running


# Gives the page a file: by an event of this kind, whose field has the files.
GIVE = """(async () => {
  const bytes = Uint8Array.from(atob(DATA), character => character.charCodeAt(0)), transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "a.png", {type: "image/png"}));
  transfer.items.add(new File(["text"], "a.txt", {type: "text/plain"}));
  const event = new Event("KIND", {cancelable: true});
  event.FIELD = transfer;
  dispatchEvent(event);
})()"""


@browser
@pytest.mark.parametrize(("kind", "field"), [("drop", "dataTransfer"), ("paste", "clipboardData")])
def test_the_chat_page_sends_an_image_that_it_gets(served: Served, kind: str, field: str) -> None:
    url = data_url("red")
    with opened(served) as page:
        give = GIVE.replace("DATA", repr(url.partition(",")[2])).replace("KIND", kind).replace("FIELD", field)
        page.evaluate(give)
        page.wait_for("images.length === 1")
        assert page.evaluate("document.querySelectorAll('#images img').length") == 1
        page.evaluate("$('temperature').value = 0")
        answer = say(page, "what?")
        (message, _) = page.evaluate("messages")
        assert message["content"] == [image_part(url), {"type": "text", "text": "what?"}]
        body = {"messages": [message], "temperature": 0, "return_token_ids": True}
        expected = served.ask("/v1/chat/completions", body)[1]["choices"][0]["token_ids"]
        assert answer["tokens"] == expected[: len(answer["tokens"])]
        assert page.evaluate("[images.length, document.querySelectorAll('article img').length]") == [0, 1]
        assert page.errors == []


@browser
def test_a_file_that_is_no_image_of_the_server_or_the_browser_is_not_sent(served: Served) -> None:
    with opened(served) as page:
        page.evaluate("""(async () => {
          await attach([new File(["no image"], "broken.png", {type: "image/png"})]);
          const bitmap = new Uint8Array(58);  // a BMP of one pixel
          bitmap.set([66, 77, 58, 0, 0, 0, 0, 0, 0, 0, 54, 0, 0, 0, 40, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 24]);
          await attach([new File([bitmap], "a.bmp", {type: "image/bmp"})]);
        })()""")
        page.wait_for("images.length === 1")
        assert page.evaluate("images[0].slice(0, 15)") == "data:image/jpeg"
        alert = page.evaluate("document.querySelector('[role=alert]').textContent")
        assert alert == "broken.png is no image that this browser reads."


@browser
def test_an_image_can_be_removed_and_a_large_one_is_made_smaller(served: Served) -> None:
    with opened(served) as page:
        page.evaluate("""(async () => {
          const canvas = document.createElement("canvas"), random = new Uint8Array(65536);
          [canvas.width, canvas.height] = [3000, 300];
          const context = canvas.getContext("2d"), noise = context.createImageData(3000, 300);
          for (let at = 0; at < noise.data.length; at += 65536) {
            noise.data.set(crypto.getRandomValues(random).subarray(0, noise.data.length - at), at);
          }
          context.putImageData(noise, 0, 0);
          canvas.toBlob(blob => attach([blob]));
        })()""")
        page.wait_for("images.length === 1")
        assert page.evaluate("images[0].slice(0, 15)") == "data:image/jpeg"
        page.wait_for("document.querySelector('#images img').naturalWidth > 0")
        assert page.evaluate("document.querySelector('#images img').naturalWidth") == 2048
        page.evaluate("document.querySelector('#images button').click()")
        assert page.evaluate("[images.length, $('images').childElementCount]") == [0, 0]
