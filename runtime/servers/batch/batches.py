"""The batches of ``/v1/batches``: which there are, and which runs next."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from tandemrt.engines.validation.errors import BadRequest, QueueFull
from tandemrt.runtime.servers.batch.files import StoredFile
from tandemrt.runtime.servers.batch.records import StoredRecord, StoredRecords

MAX_OPEN = 64  # batches that have not ended
MAX_OPEN_PER_KEY = 32
MAX_ENDED = 10_000  # the server forgets earlier ones
WINDOW_S = 24 * 3600  # then a batch ends with the answers that it has

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
_ENDED = ("failed", "completed", "expired", "cancelled")
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@dataclass(frozen=True)
class Batch(StoredRecord):
    """One batch.

    Attributes:
        times: seconds since 1970 at which it took each status.
        errors: why it failed, as OpenAI's API shows it.
        total, completed, failed: numbers of requests.
    """

    endpoint: str
    input_file_id: str
    metadata: Mapping[str, str] | None = None
    status: Status = "validating"
    times: Mapping[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def ended(self) -> bool:
        return self.status in _ENDED

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW_S

    def card(self) -> dict[str, Any]:
        """Return the batch as OpenAI's API shows it."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class BatchStore:
    """Batches in ``folder``. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.records = StoredRecords(folder, Batch, "batch")
        self._last_runs: dict[str, float] = {}  # by owner

    def answers(self, batch: Batch) -> Path:
        """Return the folder of its answers while it runs."""
        return self.records.folder / batch.id

    def add(self, file: StoredFile, endpoint: str, metadata: Mapping[str, str] | None) -> Batch:
        """Queue a batch of the requests in ``file``. Raises QueueFull."""
        open_batches = [batch for batch in self.records if not batch.ended]
        own = sum(batch.owner == file.owner for batch in open_batches)
        if len(open_batches) >= MAX_OPEN or own >= MAX_OPEN_PER_KEY:
            raise QueueFull(
                f"the server takes {MAX_OPEN} batches at a time, {MAX_OPEN_PER_KEY} of one key; wait for the end of one"
            )
        ended = [batch for batch in self.records if batch.ended]
        for batch in ended[: len(ended) - MAX_ENDED]:
            self.records.remove(batch)
        batch_id = f"batch_{uuid4().hex}"
        return self.records.add(Batch(batch_id, file.owner, int(time.time()), endpoint, file.id, metadata))

    def update(self, batch: Batch, status: Status, **changes: Any) -> Batch:
        """Give the batch another status, and save it. One that is to be cancelled keeps its status until its end."""

        def change(current: Batch) -> Batch:
            if current.status == "cancelling" and status not in _ENDED:
                return current
            return replace(current, status=status, times={**current.times, status: int(time.time())}, **changes)

        return self.records.change(batch, change)

    def count(self, batch: Batch, completed: int, failed: int) -> None:
        """Set the numbers of answers, without saving: a later run counts again."""
        self.records.change(batch, lambda now: replace(now, completed=completed, failed=failed), saved=False)

    def cancel(self, batch: Batch) -> Batch:
        """Mark the batch as to be cancelled. Raises BadRequest if it has ended."""

        def change(current: Batch) -> Batch:
            if current.ended or current.status == "finalizing":
                raise BadRequest(f"a batch that is {current.status} cannot be cancelled; read its answers")
            return replace(current, status="cancelling", times={**current.times, "cancelling": int(time.time())})

        return self.records.change(batch, change)

    def end(self, batch: Batch, status: Status, **changes: Any) -> None:
        """Give the batch its last status, and remove its folder."""
        self.update(batch, status, **changes)
        shutil.rmtree(self.answers(batch), ignore_errors=True)

    def next(self) -> Batch | None:
        """Return the batch to run next, of the key that has waited longest; one that is about to end comes first."""
        waiting = [batch for batch in self.records if not batch.ended]
        if not waiting:
            return None
        batch = min(
            waiting,
            key=lambda each: (each.status in ("validating", "in_progress"), self._last_runs.get(each.owner, 0.0)),
        )
        self._last_runs[batch.owner] = time.monotonic()
        return batch
