"""``tandemrt batch``: the answers are the server's, and a killed batch continues."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest, Closed
from tandemrt.runtime.servers.batch.answers import BatchAnswer, batch_engine
from tandemrt.runtime.servers.batch.lines import BatchLine
from tandemrt.runtime.servers.batch.run import run_batch
from tandemrt.runtime.servers.http.server import open_models
from tandemrt.runtime.servers.openai.served_models import Models
from tests.command_line import app
from tests.openai.client import EXAMPLES, Served, asking
from tests.waiting import PATIENCE_S, eventually

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# Fields that differ between two equal requests. What was cached depends on requests of other tests.
PER_ANSWER = ("id", "created", "created_at", "completed_at", "metrics", "seed", "cached_tokens")


def line(custom_id: str, url: str, **body: Any) -> BatchLine:
    return BatchLine(custom_id=custom_id, method="POST", url=url, body=body)


def write_lines(path: Path, lines: Sequence[BatchLine]) -> Path:
    path.write_text("".join(f"{request.model_dump_json()}\n" for request in lines))
    return path


def read_lines(file: Path) -> list[Any]:
    return [json.loads(text) for text in file.read_text().split("\n")[:-1]]


def comparable(value: Any) -> Any:
    """Return an answer without the fields of PER_ANSWER, at any depth."""
    if isinstance(value, dict):
        return {name: comparable(member) for name, member in value.items() if name not in PER_ANSWER}
    return [comparable(member) for member in value] if isinstance(value, list) else value


def run_command(*arguments: str | Path) -> str:
    """Run ``tandemrt batch`` in this process and return what it prints."""
    result = CliRunner().invoke(app, ["batch", *map(str, arguments), "--threads", "1"], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def completions(count: int, **more: Any) -> list[BatchLine]:
    return [
        line(f"line {at}", COMPLETIONS, prompt="Please send", seed=at, max_tokens=12, ignore_eos=True, **more)
        for at in range(count)
    ]


def test_every_line_gets_the_answer_of_the_server(demo_bundle: Path, served: Served, tmp_path: Path) -> None:
    lines = [
        *(line(f"chat {at}", CHAT, **asking(example, seed=at)) for at, example in enumerate(EXAMPLES[:4])),
        line("several", COMPLETIONS, prompt=["Please", "Send"], n=2, seed=3, max_tokens=8, temperature=1.0),
        line("logprobs", COMPLETIONS, prompt="Please", seed=3, max_tokens=8, logprobs=2, echo=True),
        line("response", RESPONSES, model="demo", input="Send one pine box.", seed=5, max_output_tokens=20),
        line("anthropic", "/v1/messages", model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=9),
        line("bad value", CHAT, model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=0),
        line("unknown field", COMPLETIONS, prompt="Hi", colour="\N{SNOWMAN}"),
        line("too long", COMPLETIONS, prompt="Hi", max_tokens=10**6),
        line("bad schema", COMPLETIONS, prompt="Hi", structured_outputs={"regex": "("}),
        line("anthropic error", "/v1/messages", model="demo", messages=[]),
    ]
    lines = [request.model_copy(update={"body": {"temperature": 0.0, **request.body}}) for request in lines]
    printed = run_command(f"demo={demo_bundle}", write_lines(tmp_path / "in.jsonl", lines), "--out", tmp_path / "out")
    assert "8 answers and 5 errors" in printed
    answers = read_lines(tmp_path / "out/output.jsonl")
    errors = read_lines(tmp_path / "out/errors.jsonl")
    assert all(answer["error"] is None for answer in (*answers, *errors))
    assert len({answer["id"] for answer in (*answers, *errors)}) == len(lines)
    by_id = {answer["custom_id"]: answer["response"] for answer in (*answers, *errors)}
    for request in lines:
        status, body, _ = served.ask(request.url, request.body)
        response = by_id[request.custom_id]
        assert response["status_code"] == status
        assert comparable(response["body"]) == comparable(body)
    assert all(answer["response"]["status_code"] == 200 for answer in answers)
    assert {error["custom_id"] for error in errors} == {request.custom_id for request in lines[8:]}


def test_an_interrupted_batch_ends_as_an_interrupted_command(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tandemrt.runtime.cli.batch._run", interrupted)
    file = write_lines(tmp_path / "in.jsonl", completions(1))
    command = ["batch", f"demo={demo_bundle}", file, "--out", tmp_path / "out", "--threads", "1"]
    result = CliRunner().invoke(app, [*map(str, command)])
    assert result.exit_code == 130
    assert result.output == "interrupted; the same command continues\n"


def test_files_and_batches_are_served_only_with_a_folder(served: Served) -> None:
    assert served.ask("/v1/files")[0] == 404
    assert served.ask("/v1/batches", {})[0] == 404


def test_an_ordered_batch_has_the_order_of_its_lines(demo_bundle: Path, tmp_path: Path) -> None:
    lines = completions(40)
    lines = [
        request.model_copy(update={"body": request.body | {"max_tokens": 1 + 30 * (at % 5 == 0)}})
        for at, request in enumerate(lines)
    ]
    file = write_lines(tmp_path / "in.jsonl", lines)
    run_command(f"demo={demo_bundle}", file, "--out", tmp_path / "out", "--ordered")
    answers = read_lines(tmp_path / "out/output.jsonl")
    assert [answer["custom_id"] for answer in answers] == [request.custom_id for request in lines]


def test_a_killed_batch_continues_and_runs_no_answered_line_again(demo_bundle: Path, tmp_path: Path) -> None:
    lines = [*completions(60), line("bad", COMPLETIONS, prompt="Hi", max_tokens=0)]
    lines = [
        request.model_copy(update={"body": {"max_tokens": 60, **request.body, "logprobs": 0}}) for request in lines
    ]
    file, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out"
    arguments = [f"demo={demo_bundle}", file, "--out", out]
    output = out / "output.jsonl"
    command = [sys.executable, "-c", "from tandemrt.cli import main; main()", "batch", *map(str, arguments)]
    process = subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.DEVNULL)
    try:
        assert eventually(lambda: output.exists() and output.read_bytes().count(b"\n") >= 3)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    whole = output.read_bytes()
    whole = whole[: whole.rindex(b"\n") + 1]
    assert whole.count(b"\n") < 60
    output.write_bytes(whole + b'{"id": "batch_req_0", "custom_id": "li')  # as a write that a crash cut
    assert "60 answers and 1 errors" in run_command(*arguments)
    assert output.read_bytes().startswith(whole)
    answers = read_lines(output)
    assert sorted(answer["custom_id"] for answer in answers) == sorted(request.custom_id for request in lines[:60])
    run_command(*arguments[:2], "--out", tmp_path / "at once", "--ordered")
    at_once = {answer["custom_id"]: answer for answer in read_lines(tmp_path / "at once/output.jsonl")}
    for answer in answers:
        expected = at_once[answer["custom_id"]]
        assert comparable(answer["response"]["body"]) == comparable(expected["response"]["body"])

    before = output.read_bytes()
    assert "60 answers and 1 errors" in run_command(*arguments)  # everything is answered: nothing runs
    assert output.read_bytes() == before


def test_answers_of_another_batch_are_not_continued(demo_bundle: Path, tmp_path: Path) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", completions(1)), tmp_path / "out"
    run_command(f"demo={demo_bundle}", file, "--out", out)
    with pytest.raises(BadRequest, match="another ordered; name another"):
        run_command(f"demo={demo_bundle}", file, "--out", out, "--ordered")
    with pytest.raises(BadRequest, match="another model; name another"):
        run_command(f"other={demo_bundle}", file, "--out", out)
    write_lines(file, completions(2))
    with pytest.raises(BadRequest, match="another input_sha256; name another"):
        run_command(f"demo={demo_bundle}", file, "--out", out)


def answer_all(models: Models, lines: Sequence[BatchLine], in_flight: int) -> list[BatchAnswer]:
    answers: list[BatchAnswer] = []

    async def run() -> None:
        async with batch_engine(models, 16 << 20) as engine:
            await run_batch(lines, engine.answer, answers.append, in_flight=in_flight, ordered=False)

    asyncio.run(run())
    return answers


def test_lines_wait_for_room_in_a_full_queue(demo_bundle: Path) -> None:
    lines = completions(24, n=2)
    with open_models({"demo": demo_bundle}, RuntimeOptions(threads=1, queue_limit=1)) as models:
        answers = answer_all(models, lines, in_flight=24)
    assert [answer.status for answer in answers] == [200] * 24


def test_a_line_cannot_stream(served: Served) -> None:
    [answer] = answer_all(Models(served.llms, 0), [line("stream", COMPLETIONS, prompt="Hi", stream=True)], 1)
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["message"].startswith("stream: must be false in a batch")


def test_an_engine_that_has_ended_ends_the_batch_without_error_lines(demo_bundle: Path) -> None:
    """A later run answers these lines."""
    with open_models({"demo": demo_bundle}, RuntimeOptions(threads=1)) as models:
        models.llms["demo"].close()
        with pytest.raises(Closed):
            answer_all(models, completions(3), in_flight=2)
