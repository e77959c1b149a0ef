"""The files of a batch: which inputs are rejected, and what a run leaves that may be killed at any byte."""

import asyncio
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.servers.batch.answers import BatchAnswer
from tandemrt.runtime.servers.batch.folder import ERRORS, OUTPUT, BatchFolder, BatchJob, open_folder
from tandemrt.runtime.servers.batch.lines import MAX_LINE, BatchLine, check_file
from tandemrt.runtime.servers.batch.run import run_batch

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
FILES = (OUTPUT, ERRORS)


class Killed(Exception):
    """Ends a run as a kill would, between two writes."""


def text_of(*lines: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "FILE: must hold at least one request"),
        ("\n \n", "FILE: must hold at least one request"),
        (text_of(GOOD) + "{", r"line 2: a line must be JSON, received b'{'"),
        (text_of(GOOD) + "\n[]\n", r"line 3: a line must be a JSON object, received \[\]"),
        (text_of(GOOD, GOOD), "line 2: custom_id: must be unique, received 'a', as in line 1"),
        (text_of(GOOD | {"custom_id": ""}), "line 1: custom_id: must not be empty"),
        (text_of(GOOD | {"custom_id": 7}), "line 1: custom_id: .* 7"),
        (text_of(GOOD | {"method": "GET"}), "line 1: method: .*POST.* 'GET'"),
        (text_of(GOOD | {"url": "/v1/embeddings"}), "line 1: url: must be one of .*, received '/v1/embeddings'"),
        (text_of(GOOD | {"url": f"{GOOD['url']}/"}), "line 1: url: must be one of .*, received '/v1/completions/'"),
        (text_of(GOOD | {"body": "Hi"}), "line 1: body: .*'Hi'"),
        (text_of(GOOD | {"boddy": {}}), r"line 1: .*boddy.* \(did you mean 'body'\?\)"),
        (text_of({"custom_id": "a"}), "line 1: method: is required and missing"),
        (text_of(GOOD | {"body": {"model": "gpt"}}), "line 1: body.model: must be one of demo, received 'gpt'"),
        ('{"custom_id": "\\ud800"}', "line 1: custom_id: must be text that UTF-8 can encode"),
        (f'{{"custom_id": "{"a" * MAX_LINE}"}}', "line 1: a line must have at most 4194304 bytes, received more"),
    ],
)
def test_a_bad_file_is_rejected_with_the_number_of_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(text)
    with pytest.raises(BadRequest, match=message) as raised:
        check_file(file, ["demo"])
    assert len(str(raised.value)) < 800


def test_a_file_that_is_not_there_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="FILE: must be a readable file"):
        check_file(tmp_path, ["demo"])


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadRequest, match="other files and no batch"), open_folder(tmp_path, job(ordered=False)):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_two_runs_do_not_write_one_folder(tmp_path: Path) -> None:
    with (
        open_folder(tmp_path, job(ordered=False)),
        pytest.raises(BadRequest, match="another process writes answers there"),
        open_folder(tmp_path, job(ordered=False)),
    ):
        pass


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Writes fail at ``size`` bytes of a file, as on a disk without room; Python ignores SIGXFSZ."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_answer_that_cannot_be_written_is_an_error_and_loses_no_earlier_one(tmp_path: Path) -> None:
    answers = [BatchAnswer(line(at), 200, json.dumps("x" * 400).encode()) for at in range(40)]
    written: list[str] = []

    def write_all(folder: BatchFolder) -> None:
        for answer in answers:
            folder.write(answer)
            written.append(answer.line.custom_id)

    with (
        open_folder(tmp_path, job(ordered=False)) as folder,
        no_file_above(10_000),
        pytest.raises(BadRequest, match=r"--out: .* room .*: File too large; make room, then the same command"),
    ):
        write_all(folder)
    with open_folder(tmp_path, job(ordered=False)) as folder:
        assert folder.answered == {*written}
        assert 0 < len(written) < len(answers)
        for answer in answers:
            if answer.line.custom_id not in folder.answered:
                folder.write(answer)
    with open_folder(tmp_path, job(ordered=False)) as folder:
        assert folder.answered == {answer.line.custom_id for answer in answers}


def job(*, ordered: bool) -> BatchJob:
    return BatchJob("0" * 64, "demo", "1" * 64, ordered)


def line(at: int) -> BatchLine:
    return BatchLine(**GOOD | {"custom_id": f"line \N{SNOWMAN} {at}"})


class Run:
    """Runs a batch of ``statuses`` in ``folder``, with an engine that answers in an order drawn from ``delays``."""

    def __init__(self, folder: Path, statuses: list[int], delays: list[int], *, ordered: bool, in_flight: int) -> None:
        self.folder = folder
        self.lines = [line(at) for at in range(len(statuses))]
        self.statuses = {batch_line.custom_id: status for batch_line, status in zip(self.lines, statuses, strict=True)}
        self.delays = dict(zip(self.statuses, delays, strict=True))
        self.ordered = ordered
        self.in_flight = in_flight
        self.most_begun = 0  # lines that were read and not yet written
        self.begun = 0

    def run(self, writes: int | None) -> list[str]:
        """Run until the end, or until ``writes`` answers are written. Returns the lines that the engine answered."""
        asked: list[str] = []
        written = 0
        self.begun = 0

        async def answer(batch_line: BatchLine) -> BatchAnswer:
            asked.append(batch_line.custom_id)
            for _ in range(self.delays[batch_line.custom_id]):
                await asyncio.sleep(0)
            return BatchAnswer(batch_line, self.statuses[batch_line.custom_id], b'{"text": "\xe2\x98\x83"}')

        with open_folder(self.folder, job(ordered=self.ordered)) as folder:

            def unanswered() -> Iterator[BatchLine]:
                for batch_line in self.lines:
                    if batch_line.custom_id not in folder.answered:
                        self.begun += 1
                        self.most_begun = max(self.most_begun, self.begun)
                        yield batch_line

            def write(batch_answer: BatchAnswer) -> None:
                nonlocal written
                if written == writes:
                    raise Killed
                folder.write(batch_answer)
                written += 1
                self.begun -= 1

            asyncio.run(run_batch(unanswered(), answer, write, in_flight=self.in_flight, ordered=self.ordered))
        return asked

    def answered(self, name: str) -> list[str]:
        data = (self.folder / name).read_bytes()
        assert data.endswith(b"\n") or not data
        return [json.loads(text)["custom_id"] for text in data.decode().split("\n")[:-1]]


@given(st.data())
def test_a_run_that_is_killed_at_any_byte_is_continued(data: st.DataObject) -> None:
    statuses = data.draw(st.lists(st.sampled_from([200, 200, 400, 500]), min_size=1, max_size=12))
    delays = data.draw(st.lists(st.integers(0, 5), min_size=len(statuses), max_size=len(statuses)))
    ordered, in_flight = data.draw(st.booleans()), data.draw(st.integers(1, 5))
    with TemporaryDirectory() as folder:
        batch = Run(Path(folder) / "out", statuses, delays, ordered=ordered, in_flight=in_flight)
        complete: dict[str, list[str]] = {name: [] for name in FILES}
        for _ in range(data.draw(st.integers(0, 3))):
            with suppress(Killed):
                batch.run(data.draw(st.integers(0, len(statuses))))
            for name in FILES:
                file = batch.folder / name
                content = file.read_bytes()
                last = content[:-1].rfind(b"\n") + 1  # a kill may cut the last line
                content = content[: data.draw(st.integers(last, len(content)))]
                file.write_bytes(content)
                complete[name] = [json.loads(text)["custom_id"] for text in content.split(b"\n")[:-1]]
        asked = batch.run(None)
        assert sorted(asked) == sorted(set(batch.statuses) - {*complete[OUTPUT], *complete[ERRORS]})
        answers, errors = (batch.answered(name) for name in FILES)
        assert answers[: len(complete[OUTPUT])] == complete[OUTPUT]
        assert errors[: len(complete[ERRORS])] == complete[ERRORS]
        assert sorted(answers) == sorted(name for name, status in batch.statuses.items() if status == 200)
        assert sorted(errors) == sorted(name for name, status in batch.statuses.items() if status != 200)
        if ordered:
            assert answers == [name for name, status in batch.statuses.items() if status == 200]
        assert batch.most_begun <= in_flight
