"""Compiled kernels are kept in the user's cache folder, and a cache that does not work costs nothing but time."""

import hashlib
import os
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from tandemrt.engines.user_cache import cache_folder
from tandemrt.plugins.kernels import compile_cache as cache
from tandemrt.plugins.kernels.nvrtc import Program, Result, compile_program

COPY = Program("copy.cu", b'#include "one.cuh"\nextern "C" __global__ void copy(int* x) { *x = ONE; }', ())
PROGRAM = replace(COPY, headers=(("one.cuh", b"#define ONE 1"),))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels are kept, empty."""
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def compiled(program: Program = PROGRAM, target: str = "sm_90") -> Result:
    """As in a new process."""
    compile_program.cache_clear()
    return compile_program(program, target)


def test_compiled_kernels_are_taken_from_the_cache(folder: Path) -> None:
    first = compiled()
    (file,) = folder.iterdir()
    assert compiled() == first
    cache.store(file.name, [b"cubin", b"ptx", b"log"])
    assert compiled() == Result(b"cubin", b"ptx", "log"), "the folder was not read"


@pytest.mark.usefixtures("folder")
def test_an_empty_log_is_read_without_touching_shared_memory() -> None:
    """A log of one byte was once read into the bytes object that Python keeps for every single space."""
    assert compiled(target="compute_90").log == ""
    assert b" " * int("1") == bytes([32])


def test_every_input_of_the_compiler_is_part_of_the_key(folder: Path) -> None:
    others = [
        replace(PROGRAM, headers=(("one.cuh", b"#define ONE 2"),)),
        replace(PROGRAM, source=PROGRAM.source.replace(b"copy", b"store")),
        replace(PROGRAM, defines=("-DSELECTED",)),
    ]
    results = [compiled(), *map(compiled, others), compiled(target="sm_80"), compiled(target="compute_90")]
    assert len(list(folder.iterdir())) == len(results)
    assert len({result.ptx for result in results}) == 4, "header, source and architecture"
    assert results[-1].cubin == b""


@pytest.mark.parametrize("content", [b"", b"no compressed data", None], ids=["empty", "other", "cut off"])
def test_a_damaged_file_is_ignored_and_replaced(folder: Path, content: bytes | None) -> None:
    first = compiled()
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-5] if content is None else content)
    again = compiled()  # whose log says another compile time
    assert (again.cubin, again.ptx) == (first.cubin, first.ptx)
    assert cache.load(file.name) == [again.cubin, again.ptx, again.log.encode()]


@pytest.mark.parametrize(
    "rubbish",
    [zlib.compress(b"rubbish"), zlib.compress(b"\xff" * 8), zlib.compress(bytes(7)), zlib.compress(b"x" * 10**7)],
    ids=["too short", "negative length", "no length", "large"],
)
@pytest.mark.parametrize("signed", [False, True])
def test_a_damaged_entry_that_unpacks_is_ignored(folder: Path, rubbish: bytes, signed: bool) -> None:
    cache.store("key", [b"cubin"])
    content = hashlib.sha256(b"other key" + rubbish).digest() + rubbish if signed else rubbish
    (folder / "key").write_bytes(content)
    assert cache.load("key") is None


def test_a_kernel_under_another_name_is_not_taken(folder: Path) -> None:
    cache.store("key", [b"cubin"])
    (folder / "key").rename(folder / "other")
    assert cache.load("other") is None


def test_entries_that_other_users_can_write_are_ignored(folder: Path) -> None:
    cache.store("key", [b"cubin"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache.load("key") == [b"cubin"]
    folder.chmod(0o777)
    assert cache.load("key") is None
    cache.store("key", [b"cubin"])
    assert cache.load("key") == [b"cubin"], "the folder is private again"
    (folder / "key").chmod(0o666)
    assert cache.load("key") is None


def test_a_folder_that_cannot_be_written_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path / "file"))
    assert compiled().cubin.startswith(b"\x7fELF")


def test_the_cache_evicts_the_least_recently_used_entries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LIMIT", 2500)
    for age, key in enumerate("abc"):
        cache.store(key, [os.urandom(1000)])
        if (folder / key).exists():
            os.utime(folder / key, (age, age))
        if key == "b":
            assert cache.load("a") is not None  # used just now
    assert {file.name for file in folder.iterdir()} == {"a", "c"}


def test_the_folder_is_the_one_that_was_chosen_or_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TANDEMRT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache/tandemrt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/tandemrt"
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path / "chosen"))
    assert cache_folder() == tmp_path / "chosen"
