"""Records in a folder: each key reaches its own, and what was saved is there again."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.servers.batch.records import StoredRecord, StoredRecords
from tandemrt.runtime.servers.openai.errors import UnknownObject


@dataclass(frozen=True)
class Note(StoredRecord):
    text: str = ""


LATE, EARLY = Note("a", "mine", 9, "late"), Note("b", "yours", 3, "early")


def opened(folder: Path) -> StoredRecords[Note]:
    return StoredRecords(folder, Note, "note")


def test_records_are_found_by_their_owner_only_and_listed_oldest_first(tmp_path: Path) -> None:
    notes = opened(tmp_path)
    notes.add(EARLY)
    notes.add(LATE)
    for records in (notes, opened(tmp_path)):
        assert [*records] == [EARLY, LATE]
        assert len(records) == 2
        assert (records.find("mine", "a"), records.find("yours", "b")) == (LATE, EARLY)
        for owner, record in (("yours", "a"), ("mine", "b"), ("mine", "c")):
            with pytest.raises(UnknownObject, match=f"no note '{record}' of this key"):
                records.find(owner, record)


def test_a_folder_with_a_newer_record_first_is_listed_by_age(tmp_path: Path) -> None:
    notes = opened(tmp_path)
    notes.add(LATE)
    notes.add(EARLY)
    assert [*opened(tmp_path)] == [EARLY, LATE]


@pytest.mark.parametrize("saved", [True, False])
def test_a_change_is_one_of_the_newest_version_and_of_no_other_record(tmp_path: Path, saved: bool) -> None:
    notes = opened(tmp_path)
    old, other = notes.add(LATE), notes.add(EARLY)
    notes.change(old, lambda note: replace(note, text=note.text + "+"), saved=saved)
    newest = notes.change(old, lambda note: replace(note, text=note.text + "+"), saved=saved)
    assert newest.text == notes.find("mine", "a").text == "late++"
    assert notes.find("yours", "b") == other
    assert opened(tmp_path).find("mine", "a").text == ("late++" if saved else "late")


def test_a_removed_record_does_not_come_back_and_may_be_removed_twice(tmp_path: Path) -> None:
    notes = opened(tmp_path)
    notes.add(LATE)
    notes.add(EARLY)
    for _ in range(2):
        notes.remove(LATE)
        assert [*notes] == [*opened(tmp_path)] == [EARLY]


@pytest.mark.parametrize("content", [b"{", b'{"id": "a"}', b"[]", b'{"id": "a", "owner": "", "created_at": 1, "x": 1}'])
def test_a_file_that_no_server_wrote_is_named(tmp_path: Path, content: bytes) -> None:
    opened(tmp_path).add(LATE)
    (tmp_path / "other.json").write_bytes(content)
    with pytest.raises(BadRequest, match=r"^batch_folder: .*other\.json"):
        opened(tmp_path)
