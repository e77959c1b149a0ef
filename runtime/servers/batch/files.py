"""The files of ``/v1/files``: inputs of batches, and their answers."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal
from uuid import uuid4

from tandemrt.engines.validation.errors import QueueFull, clipped
from tandemrt.runtime.servers.batch.records import StoredRecord, StoredRecords
from tandemrt.runtime.servers.openai.errors import BodyTooLarge, Overloaded

MAX_FILE = 200 << 20  # bytes of one uploaded file, as at OpenAI
MAX_FILES = 10_000
LIFETIME_S = 30 * 24 * 3600  # then a file is removed, as at OpenAI
_PARTIAL = ".part"

Purpose = Literal["batch", "batch_output"]


@dataclass(frozen=True)
class StoredFile(StoredRecord):
    """A file of ``bytes`` bytes."""

    filename: str
    purpose: Purpose
    bytes: int

    def card(self) -> dict[str, Any]:
        """Return the file as OpenAI's API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.created_at + LIFETIME_S,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """Files in ``folder``, of ``limit`` bytes in all. Thread-safe.

    Attributes:
        growing: bytes of the answers of the batch that runs, which are no file yet.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(f"*{_PARTIAL}"):  # of a server that was killed
            partial.unlink()
        self.records = StoredRecords(folder, StoredFile, "file")
        self.growing = 0
        self._limit = limit

    def path(self, file: StoredFile) -> Path:
        return self.records.folder / f"{file.id}.jsonl"

    def add(self, owner: str, filename: str, source: IO[bytes], size: int) -> StoredFile:
        """Copy an input of batches. Raises QueueFull, Overloaded, or BodyTooLarge if there is no room for it."""
        self.remove_expired()
        if len(self.records) >= MAX_FILES:
            raise QueueFull(f"the server keeps {MAX_FILES} files at most; delete some and send it again")
        self.require_room(size)
        file = StoredFile(f"file-{uuid4().hex}", owner, int(time.time()), clipped(filename), "batch", size)
        partial = self.path(file).with_suffix(_PARTIAL)
        try:
            with partial.open("wb") as target:
                shutil.copyfileobj(source, target)
            partial.replace(self.path(file))
            return self.records.add(file)
        except OSError as error:  # for example a full disk
            raise Overloaded(f"the server cannot keep the file: {error.strerror}; send it again later") from error
        finally:
            partial.unlink(missing_ok=True)

    def adopt(self, owner: str, file_id: str, filename: str, source: Path) -> str | None:
        """Take over a file of answers, and return its id; None if it is empty. A repetition changes nothing."""
        target = self.records.folder / f"{file_id}.jsonl"
        if source.exists() and source.stat().st_size:
            source.replace(target)
        if not target.exists():
            return None
        size = target.stat().st_size
        self.records.add(StoredFile(file_id, owner, int(time.time()), filename, "batch_output", size))
        return file_id

    def require_room(self, size: int) -> None:
        """Raise BodyTooLarge unless ``size`` bytes more fit."""
        used = self.growing + sum(file.bytes for file in self.records)
        if used + size > self._limit:
            raise BodyTooLarge(
                f"the files of batches may have {self._limit} bytes in all (--batch-bytes), and have {used}; delete "
                "some and send it again"
            )

    def remove(self, file: StoredFile) -> None:
        self.records.remove(file)
        self.path(file).unlink(missing_ok=True)

    def remove_expired(self) -> None:
        for file in self.records:
            if file.created_at + LIFETIME_S < time.time():
                self.remove(file)
