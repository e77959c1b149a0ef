"""Records of one kind in a folder: a JSON file for each, which only the key that wrote it reaches."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tandemrt.engines.user_cache import write_file
from tandemrt.engines.validation.errors import BadRequest, clipped, quoted
from tandemrt.runtime.servers.openai.errors import UnknownObject


@dataclass(frozen=True)
class StoredRecord:
    """What files and batches have in common.

    Attributes:
        owner: digest of the key that created it (key_digest).
        created_at: seconds since 1970.
    """

    id: str
    owner: str
    created_at: int


R = TypeVar("R", bound=StoredRecord)


class StoredRecords(Generic[R]):
    """The records of ``kind`` in ``folder``, which one process uses at a time. Thread-safe.

    Args:
        noun: what the API calls them.
    """

    def __init__(self, folder: Path, kind: type[R], noun: str) -> None:
        self.folder = folder
        self._noun = noun
        self._lock = threading.Lock()
        records = []
        for file in folder.glob("*.json"):
            try:
                records.append(kind(**json.loads(file.read_bytes())))
            except (ValueError, TypeError) as error:
                raise BadRequest(
                    f"batch_folder: must hold only what a server wrote, received {clipped(file)}: "
                    f"{clipped(error)}; remove the file or name another folder"
                ) from error
        self._records = {record.id: record for record in sorted(records, key=lambda each: each.created_at)}

    def __iter__(self) -> Iterator[R]:
        """Iterate over all records, oldest first."""
        with self._lock:
            return iter(list(self._records.values()))

    def __len__(self) -> int:
        return len(self._records)

    def find(self, owner: str, record_id: str) -> R:
        """Return the record. Raises UnknownObject if there is none, or none of this owner."""
        record = self._records.get(record_id)
        if record is None or record.owner != owner:
            raise UnknownObject(f"there is no {self._noun} {quoted(record_id)} of this key; list them to see which are")
        return record

    def add(self, record: R) -> R:
        """Save ``record``, also in place of the one with its id."""
        with self._lock:
            self._save(record)
        return record

    def change(self, record: R, change: Callable[[R], R], *, saved: bool = True) -> R:
        """Replace the newest version of ``record`` by what ``change`` makes of it. Not ``saved``: only in memory."""
        with self._lock:
            changed = change(self._records[record.id])
            if saved:
                self._save(changed)
            else:
                self._records[record.id] = changed
        return changed

    def remove(self, record: R) -> None:
        with self._lock:
            self._records.pop(record.id, None)
            self._file(record).unlink(missing_ok=True)

    def _save(self, record: R) -> None:
        write_file(self._file(record), json.dumps(asdict(record)).encode())
        self._records[record.id] = record

    def _file(self, record: R) -> Path:
        return self.folder / f"{record.id}.json"
