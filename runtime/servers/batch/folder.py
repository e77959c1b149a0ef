"""The output of a batch: a folder with answers and errors in OpenAI's batch format, which a later run continues.

``output.jsonl`` has the answers with status 200, ``errors.jsonl`` the others. Each line is written at once and at its
end, so a process that is killed leaves at most one partial line, the last one of a file. The next run drops it.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from tandemrt.engines.bundle.lock import locked
from tandemrt.engines.user_cache import write_file
from tandemrt.engines.validation.errors import BadRequest, clipped, quoted
from tandemrt.runtime.servers.batch.answers import BatchAnswer

OUTPUT, ERRORS, JOB = "output.jsonl", "errors.jsonl", "batch.json"


class UnusableFolder(BadRequest):
    """A folder belongs to another batch, or cannot be written."""


@dataclass(frozen=True)
class BatchJob:
    """What the answers of a folder belong to. A later run continues them only if all of it is the same.

    Attributes:
        input_sha256: digest of the input file.
        model: name of the served model.
        bundle_sha256: digest of its manifest, which has the digests of all of its files.
        ordered: whether the answers have the order of the requests.
    """

    input_sha256: str
    model: str
    bundle_sha256: str
    ordered: bool


class BatchFolder:
    """The two files of a folder.

    Attributes:
        answered: ``custom_id`` of each answer and each error, of earlier runs as well.
        errors: number of the errors among them.
        size: bytes of both files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        failed = _resume(folder / ERRORS)
        self.answered = _resume(folder / OUTPUT) | failed
        self.errors = len(failed)
        self.size = sum((folder / name).stat().st_size for name in (OUTPUT, ERRORS))

    def write(self, answer: BatchAnswer) -> None:
        """Append an answer. Raises UnusableFolder."""
        fields = {"id": f"batch_req_{uuid4().hex}", "custom_id": answer.line.custom_id}
        response = {"status_code": answer.status, "request_id": f"req_{uuid4().hex}"}
        line = b'%s, "response": %s, "body": %s}, "error": null}\n' % (
            json.dumps(fields).encode()[:-1],
            json.dumps(response).encode()[:-1],
            answer.body,
        )
        try:
            with (self._folder / (OUTPUT if answer.status == 200 else ERRORS)).open("ab") as file:
                file.write(line)
        except OSError as error:  # for example a full disk
            raise UnusableFolder(
                f"--out: must be a folder with room for the answers, received {clipped(self._folder)}: "
                f"{error.strerror}; make room, then the same command continues"
            ) from error
        self.answered.add(answer.line.custom_id)
        self.errors += answer.status != 200
        self.size += len(line)


@contextmanager
def open_folder(folder: Path, job: BatchJob) -> Iterator[BatchFolder]:
    """Open ``folder`` for the answers of ``job``, or make it. Raises UnusableFolder."""
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if stack.enter_context(locked(folder)) is False:
                raise _unusable(folder, "another process writes answers there")
            _require_job(folder, job)
            answers = BatchFolder(folder)
        except OSError as error:
            raise _unusable(folder, f"{error.strerror}") from error
        yield answers


def _require_job(folder: Path, job: BatchJob) -> None:
    file, fields = folder / JOB, asdict(job)
    if not file.exists():
        if any(folder.iterdir()):
            raise _unusable(folder, f"it has other files and no {JOB}")
        write_file(file, json.dumps(fields, indent=2).encode() + b"\n")
        return
    try:
        earlier = json.loads(file.read_bytes())
    except ValueError as error:
        raise _unusable(folder, f"{JOB} is not JSON") from error
    if earlier != fields:
        changed = [name for name in fields if not isinstance(earlier, dict) or earlier.get(name) != fields[name]]
        raise _unusable(folder, f"it has the answers of a batch with another {', '.join(changed) or 'form'}")


def _resume(path: Path) -> set[str]:
    """Return ``custom_id`` of each line, and drop a partial last line. Makes the file if there is none."""
    answered = set[str]()
    end = 0
    with path.open("a+b") as file:
        file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                answered.add(json.loads(line)["custom_id"])
            except (ValueError, TypeError, KeyError) as error:
                raise BadRequest(
                    f"--out: {path.name} must have an answer in each line, received {quoted(line)} in line {number}; "
                    "remove the line"
                ) from error
            end += len(line)
        file.truncate(end)
    return answered


def _unusable(folder: Path, problem: str) -> UnusableFolder:
    return UnusableFolder(
        f"--out: must be a folder for this batch alone, received {clipped(folder)}: {problem}; name another"
    )
