"""``/v1/files`` and ``/v1/batches`` with OpenAI's client: answers, errors, cancellation, restarts, keys and limits."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.servers.batch import batches, files, upload, worker
from tandemrt.runtime.servers.batch.routes import batch_routes
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.openai.served_models import Models
from tests.openai.client import EXAMPLES, Served, asking
from tests.openai.conftest import serving
from tests.openai.test_batch import comparable
from tests.waiting import PATIENCE_S, eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "demo", **body}}


def completions(count: int, **more: Any) -> list[dict[str, Any]]:
    fields = {"prompt": "Please send", "max_tokens": 8, "ignore_eos": True, **more}
    return [request(f"line {at}", seed=at, **fields) for at in range(count)]


def jsonl(requests: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in requests)


@contextmanager
def client_of(served: Served, key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key=key, max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@contextmanager
def serving_batches(bundle: Path, folder: Path, **more: Any) -> Iterator[Served]:
    config = ServerConfig(port=0, grace_s=10, batch_folder=folder, **more)
    with serving(bundle, config, RuntimeOptions(threads=1)) as running:
        yield running


@pytest.fixture(scope="module")
def server(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_batches(demo_bundle, tmp_path_factory.mktemp("batches") / "new") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with client_of(server) as opened:
        yield opened


def start(client: openai.OpenAI, requests: Sequence[dict[str, Any]], url: Any = COMPLETIONS, **more: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", jsonl(requests)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **more)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    """Return the batch after its end."""
    last = ("completed", "failed", "cancelled", "expired")
    assert eventually(lambda: client.batches.retrieve(batch.id).status in last)
    return client.batches.retrieve(batch.id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_has_the_answers_of_the_server(server: Served, client: openai.OpenAI) -> None:
    requests = [
        *(request(f"chat {at}", CHAT, **asking(example, seed=at)) for at, example in enumerate(EXAMPLES[:3])),
        request("bad", CHAT, messages=[{"role": "user", "content": "Hi"}], max_tokens=0),
    ]
    created = start(client, requests, CHAT, metadata={"for": "test"})
    assert (created.status, created.object, created.endpoint) == ("validating", "batch", CHAT)
    batch = ended(client, created)
    assert (batch.status, batch.metadata, batch.errors) == ("completed", {"for": "test"}, None)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 3, "failed": 1}
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at, batch.expires_at]
    assert times == sorted(times, key=lambda time: time or 0)
    lines = {line["custom_id"]: line for line in lines_of(client, batch.output_file_id)}
    errors = lines_of(client, batch.error_file_id)
    assert [line["custom_id"] for line in errors] == ["bad"]
    for line in requests:
        status, body, _ = server.ask(CHAT, line["body"])
        response = {"bad": errors[0], **lines}[line["custom_id"]]["response"]
        answers = [{**comparable(each), "usage": None} for each in (response["body"], body)]  # one is cached
        assert response["status_code"] == status
        assert answers[0] == answers[1]


def test_files_are_kept_listed_and_deleted(client: openai.OpenAI) -> None:
    data = jsonl(completions(2))
    before = {file.id for file in client.files.list()}
    file = client.files.create(file=("my file.jsonl", data), purpose="batch")
    assert (file.filename, file.bytes, file.purpose, file.status) == ("my file.jsonl", len(data), "batch", "processed")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == data
    assert {each.id for each in client.files.list(purpose="batch")} - before == {file.id}
    assert client.files.delete(file.id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file 'file-"):
            ask(file.id)


def test_lists_have_pages(client: openai.OpenAI) -> None:
    created = [client.files.create(file=(f"{at}.jsonl", b"{}"), purpose="batch").id for at in range(3)]
    page = client.files.list(limit=2)
    assert page.has_more
    assert len(page.data) == 2
    listed = [file.id for file in client.files.list(limit=1)]  # the client asks for every page
    assert len(listed) == len(set(listed)) >= 3
    assert set(created) <= set(listed)
    assert [file.id for file in client.files.list(order="asc")] == listed[::-1]
    with pytest.raises(openai.BadRequestError, match="after: must be the id of an entry"):
        client.files.list(after="file-nowhere")
    with pytest.raises(openai.BadRequestError, match="limit: must be 1 to 100, received '0'"):
        client.batches.list(limit=0)


@pytest.mark.parametrize(
    ("data", "line", "message"),
    [
        (b"", None, "must hold at least one request"),
        (jsonl(completions(1)) + b"{", 2, "a line must be JSON"),
        (jsonl(completions(1) * 2), 2, "custom_id: must be unique"),
        (jsonl([request("a", CHAT)]), 1, f"url: must be that of the batch, {COMPLETIONS}, received '{CHAT}'"),
        (jsonl([request("a", model="gpt")]), 1, "body.model: must be one of demo, received 'gpt'"),
    ],
    ids=["empty", "no JSON", "repeated", "another endpoint", "another model"],
)
def test_a_file_that_is_no_batch_fails_with_the_number_of_the_line(
    client: openai.OpenAI, data: bytes, line: int | None, message: str
) -> None:
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    batch = ended(client, batch)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    [error] = batch.errors.data
    assert error.line == line
    assert error.message is not None
    assert message in error.message


def test_a_batch_is_rejected_at_once_if_its_fields_are_wrong(server: Served, client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", jsonl(completions(1))), purpose="batch")
    fields = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    for wrong, status, message in (
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint: must be one of"),
        ({"completion_window": "1h"}, 400, "completion_window: "),
        ({"input_file_id": "file-nowhere"}, 404, "there is no file 'file-nowhere'"),
        ({"metadata": {str(at): "" for at in range(17)}}, 400, "metadata: "),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, 400, "output_expires_after"),
    ):
        answer = server.ask("/v1/batches", fields | wrong)
        assert (answer[0], message in answer[1]["error"]["message"]) == (status, True), answer


def test_a_cancelled_batch_keeps_the_answers_that_it_has(client: openai.OpenAI) -> None:
    batch = start(client, completions(200, max_tokens=60))

    def answers() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None
        return counts.completed

    assert eventually(lambda: answers() >= 2)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.request_counts is not None
    lines = lines_of(client, batch.output_file_id)
    assert 2 <= len(lines) < 200
    assert len({line["custom_id"] for line in lines}) == len(lines)
    with pytest.raises(openai.BadRequestError, match="a batch that is cancelled cannot be cancelled"):
        client.batches.cancel(batch.id)


def test_the_input_of_an_open_batch_cannot_be_deleted(client: openai.OpenAI) -> None:
    batch = start(client, completions(200, max_tokens=60))
    with pytest.raises(openai.BadRequestError, match=f"the file is the input of {batch.id}"):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    ended(client, batch)
    assert client.files.delete(batch.input_file_id).deleted


def test_a_key_reaches_only_what_it_created(server: Served) -> None:
    with client_of(server, "one") as one, client_of(server, "two") as two:
        batch = ended(one, start(one, completions(1)))
        assert [each.id for each in one.batches.list()] == [batch.id]
        assert list(two.batches.list()) == []
        assert list(two.files.list()) == []
        assert batch.output_file_id is not None
        for ask, name in (
            (two.batches.retrieve, batch.id),
            (two.batches.cancel, batch.id),
            (two.files.retrieve, batch.input_file_id),
            (two.files.content, batch.output_file_id),
            (two.files.delete, batch.output_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask(name)
        with pytest.raises(openai.NotFoundError):
            two.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")


def test_an_interrupted_batch_continues_with_the_next_server(demo_bundle: Path, tmp_path: Path) -> None:
    requests = completions(24, max_tokens=30)
    with serving_batches(demo_bundle, tmp_path, api_key="secret") as first, client_of(first, "secret") as client:
        assert first.ask("/v1/files")[0] == 401
        batch = start(client, requests)

        def answered() -> list[bytes]:
            return [line for file in tmp_path.glob("batches/*/output.jsonl") for line in file.read_bytes().splitlines()]

        assert eventually(lambda: len(answered()) >= 2)
    before = answered()
    assert len(before) < 24
    with serving_batches(demo_bundle, tmp_path, api_key="secret") as second, client_of(second, "secret") as client:
        batch = ended(client, batch)
        assert batch.status == "completed"
        assert batch.output_file_id is not None
        lines = client.files.content(batch.output_file_id).content.splitlines()
        assert lines[: len(before)] == before
        assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(line["custom_id"] for line in requests)
        assert not list(tmp_path.glob("batches/*/"))


def test_a_folder_belongs_to_one_server(server: Served, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    models = Models(server.llms, created=0)
    with batch_routes(models, ServerConfig(batch_folder=tmp_path / "batches")):
        for name, problem in (("batches", "another server uses it"), ("file", "cannot be made")):
            config = ServerConfig(batch_folder=tmp_path / name)
            with pytest.raises(BadRequest, match=problem), batch_routes(models, config):
                pass


def test_files_have_limits(demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_batches(demo_bundle, tmp_path, batch_bytes=1000) as small, client_of(small) as client:
        client.files.create(file=("a", b"a" * 600), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="may have 1000 bytes in all") as raised:
            client.files.create(file=("a", b"a" * 600), purpose="batch")
        assert raised.value.status_code == 413
        monkeypatch.setattr(upload, "MAX_FILE", 200_000)
        with pytest.raises(openai.APIStatusError, match="file: must have at most 200000 bytes"):
            client.files.create(file=("a", b"a" * 300_000), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="purpose: must be 'batch', received 'vision'"):
            client.files.create(file=("a", b"a"), purpose="vision")
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            client.files.create(
                file=("a", b"a"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
            )
        monkeypatch.setattr(files, "MAX_FILES", 1)
        with pytest.raises(openai.RateLimitError, match="keeps 1 files at most"):
            client.files.create(file=("a", b"a"), purpose="batch")
        monkeypatch.undo()
        shutil.rmtree(tmp_path / "files")
        with pytest.raises(openai.APIStatusError, match="cannot keep the file: No such file or directory") as raised:
            client.files.create(file=("a", b"a"), purpose="batch")
        assert raised.value.status_code == 503
        (tmp_path / "files").mkdir()
        monkeypatch.setattr(files, "LIFETIME_S", -1)
        assert list(client.files.list()) == []
        assert not list((tmp_path / "files").iterdir())


def test_a_page_of_another_origin_cannot_upload(server: Served) -> None:
    """Browsers send forms to any server without asking it."""
    form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser\r\n--x--\r\n'
    for origin, message in (("http://evil.example", "Origin: must be"), (server.url.removesuffix("/v1"), "purpose: ")):
        connection = server.connect()
        headers = {"Content-Type": "multipart/form-data; boundary=x", "Origin": origin}
        connection.request("POST", "/v1/files", form, headers)
        response = connection.getresponse()
        assert message in json.loads(response.read())["error"]["message"]
        assert response.status == 400
        connection.close()


def test_batches_have_limits(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_REQUESTS", 3)
    [error] = ended(client, start(client, completions(4))).errors.data  # type: ignore[union-attr, misc]
    assert error.line == 4
    monkeypatch.setattr(worker, "MAX_REQUESTS", 300)
    running = start(client, completions(200, max_tokens=60))
    monkeypatch.setattr(batches, "MAX_OPEN_PER_KEY", 1)
    with pytest.raises(openai.RateLimitError, match="1 of one key; wait for the end of one"):
        start(client, completions(1))
    client.batches.cancel(running.id)
    assert ended(client, running).status == "cancelled"


def test_a_batch_that_takes_too_long_or_too_much_room_ends_with_its_answers(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_batches(demo_bundle, tmp_path, batch_bytes=60_000) as small, client_of(small) as client:
        full = ended(client, start(client, completions(200)))
        assert full.status == "failed"
        assert full.errors is not None
        assert full.errors.data is not None
        assert "(--batch-bytes)" in str(full.errors.data[0].message)
        lines = lines_of(client, full.output_file_id)
        assert 0 < len(lines) < 200
        assert full.output_file_id is not None
        client.files.delete(full.output_file_id)
        monkeypatch.setattr(batches, "WINDOW_S", 1)
        expired = ended(client, start(client, completions(90, max_tokens=200)))
        assert expired.status == "expired"
        assert len(lines_of(client, expired.output_file_id)) < 90
