"""Algorithms of matmuls that trials chose, kept in the user's cache folder."""

from pathlib import Path

import pytest

from tandemrt.plugins.kernels.cublaslt import Algorithm
from tandemrt.plugins.kernels.matmul_choices import Choices

FOUND = Algorithm.from_buffer_copy(bytes(range(64)))


def never() -> Algorithm | None:
    raise AssertionError("a choice is kept, so nothing is tried")


def test_another_process_finds_what_was_chosen(tmp_path: Path) -> None:
    file = tmp_path / "matmuls" / "device"
    first, other = Choices(file), Choices(file)
    assert first.get_or_try("a", lambda _: True, lambda: FOUND) is FOUND
    assert other.get_or_try("b", lambda _: True, lambda: None) is None
    for choices in (first, other, Choices(file)):
        kept = choices.get_or_try("a", lambda _: True, lambda: FOUND)
        assert kept is not None
        assert bytes(kept) == bytes(FOUND)
    assert Choices(file).get_or_try("b", lambda _: True, never) is None


def test_an_algorithm_that_the_library_no_longer_supports_is_chosen_again(tmp_path: Path) -> None:
    Choices(tmp_path / "matmuls" / "device").get_or_try("a", lambda _: True, lambda: FOUND)
    assert Choices(tmp_path / "matmuls" / "device").get_or_try("a", lambda _: False, lambda: None) is None


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": 3}', b'{"a": "00"}', b'{"a": "x"}', b"\xff"])
def test_a_damaged_file_costs_a_trial(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "matmuls" / "device"
    Choices(file).get_or_try("a", lambda _: True, lambda: None)
    file.write_bytes(content)
    assert Choices(file).get_or_try("a", lambda _: True, lambda: FOUND) is FOUND


def test_a_file_that_other_users_can_write_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "matmuls" / "device"
    Choices(file).get_or_try("a", lambda _: True, lambda: None)
    file.chmod(0o666)
    assert Choices(file).get_or_try("a", lambda _: True, lambda: FOUND) is FOUND
