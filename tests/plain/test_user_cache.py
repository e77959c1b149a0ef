"""Files in the user's cache folder: who may write them, and which ones are removed."""

import os
from pathlib import Path

import pytest

from tandemrt.engines.user_cache import is_private, make_private, trim_cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of 10, 20 and 40 bytes; "old" was modified first and "new" last."""
    for modified, (name, size) in enumerate({"old": 10, "middle": 20, "new": 40}.items(), 1):
        (tmp_path / name).write_bytes(b"x" * size)
        os.utime(tmp_path / name, (modified, modified))
    return tmp_path


@pytest.mark.parametrize(
    ("nbytes", "left"),
    [
        (70, {"old", "middle", "new"}),
        (69, {"middle", "new"}),
        (60, {"middle", "new"}),
        (59, {"new"}),
        (40, {"new"}),
        (39, set()),
    ],
)
def test_the_least_recently_modified_files_are_removed_until_the_rest_fits(
    folder: Path, nbytes: int, left: set[str]
) -> None:
    trim_cache(folder, nbytes)
    assert {file.name for file in folder.iterdir()} == left


def test_a_folder_that_does_not_exist_is_left_alone(tmp_path: Path) -> None:
    trim_cache(tmp_path / "none", 0)
    assert not (tmp_path / "none").exists()


def test_other_users_lose_their_access_to_a_private_folder(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir(mode=0o755)
    for folder in (tmp_path / "old", tmp_path / "parent" / "new"):
        make_private(folder)
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "private"), [(0o755, True), (0o775, False), (0o757, False)])
def test_a_folder_that_others_may_write_is_not_private(tmp_path: Path, mode: int, private: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").chmod(mode)
    assert is_private(tmp_path / "folder") == private
