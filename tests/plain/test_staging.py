"""A bundle folder appears whole or not at all, and only replaces a bundle."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.export.staging import check_destination, place, staged
from tests.plain.test_bundle import edit, write_bundle
from tests.waiting import receive_interrupts


def file_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_the_folder_appears_when_the_build_is_complete(tmp_path: Path) -> None:
    with staged(tmp_path / "new/bundle") as folder:
        (folder / "file").write_text("content")
        assert not (tmp_path / "new/bundle").exists()
    assert (tmp_path / "new/bundle/file").read_text() == "content"
    assert file_names(tmp_path / "new") == ["bundle"]


def test_the_folder_has_default_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with staged(tmp_path / "bundle"):
        pass
    assert (tmp_path / "bundle").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_old_folder_is_replaced_completely(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    with staged(tmp_path / "bundle") as folder:
        (folder / "file").write_text("new")
        assert (tmp_path / "bundle/bundle.json").exists()
    assert file_names(tmp_path / "bundle") == ["file"]
    assert file_names(tmp_path) == ["bundle"]


@pytest.mark.parametrize("interruption", [ValueError, KeyboardInterrupt])
def test_an_interrupted_build_leaves_only_the_old_folder(tmp_path: Path, interruption: type[BaseException]) -> None:
    old = write_bundle(tmp_path / "bundle")

    def build_and_fail() -> None:
        with staged(tmp_path / "bundle") as folder:
            (folder / "file").write_text("half")
            raise interruption

    with pytest.raises(interruption):
        build_and_fail()
    assert old.problems(verify=True) == []
    assert file_names(tmp_path) == ["bundle"]


def test_a_build_that_cannot_take_the_place_of_the_old_folder_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, rename = write_bundle(tmp_path / "bundle"), Path.rename

    def build() -> None:
        with staged(tmp_path / "bundle") as folder:
            (folder / "file").write_text("new")
            monkeypatch.setattr(Path, "rename", lambda path, to: refuse() if path == folder else rename(path, to))

    def refuse() -> Path:
        raise OSError("no such luck")

    with pytest.raises(OSError, match="no such luck"):
        build()
    assert old.problems(verify=True) == []
    assert file_names(tmp_path) == ["bundle"]


def test_a_symbolic_link_keeps_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with staged(tmp_path / "link") as folder:
        (folder / "file").write_text("")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real/file").exists()


def test_an_equally_named_bundle_an_empty_folder_and_a_new_path_may_be_written(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    (tmp_path / "empty").mkdir()
    for place_name in ("bundle", "empty", "free"):
        check_destination(tmp_path / place_name, "sample", force=False)


def test_a_bundle_of_another_name_is_replaced_only_with_force(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    with pytest.raises(BadBundle, match=r"is 'sample', not 'other'\. Use --force or another --out"):
        check_destination(tmp_path / "bundle", "other", force=False)
    check_destination(tmp_path / "bundle", "other", force=True)


def test_an_unreadable_bundle_is_replaced_only_with_force(tmp_path: Path) -> None:
    edit(write_bundle(tmp_path / "bundle").folder, "manifest_version", value=9)
    with pytest.raises(BadBundle, match="cannot be read; replace it with --force"):
        check_destination(tmp_path / "bundle", "sample", force=False)
    check_destination(tmp_path / "bundle", "sample", force=True)


def test_an_equally_named_bundle_of_an_earlier_version_is_replaced(tmp_path: Path) -> None:
    edit(write_bundle(tmp_path / "bundle").folder, "manifest_version", value=1)
    check_destination(tmp_path / "bundle", "sample", force=False)
    with pytest.raises(BadBundle, match="is 'sample', not 'other'"):
        check_destination(tmp_path / "bundle", "other", force=False)


@pytest.mark.parametrize("force", [False, True])
def test_a_path_that_is_no_bundle_is_never_replaced(tmp_path: Path, force: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/thesis.tex").write_text("")
    for place_name in ("folder", "folder/thesis.tex"):
        with pytest.raises(BadBundle, match=r"out must be free or hold a bundle; .* Choose another place with --out"):
            check_destination(tmp_path / place_name, "sample", force=force)


@pytest.mark.parametrize("inside", ["bundle/target", "bundle/new/one"])
def test_a_path_inside_another_bundle_is_rejected(tmp_path: Path, inside: str) -> None:
    write_bundle(tmp_path / "bundle")
    with pytest.raises(BadBundle, match=r"out must not be inside a bundle; .*/bundle is one\. Choose another place"):
        check_destination(tmp_path / inside, "sample", force=True)


def test_a_path_that_cannot_be_written_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadBundle, match=r"out must be in a folder that can be written; .*/file: Not a directory"):
        staged(tmp_path / "file/bundle").__enter__()


def test_a_placed_file_is_independent_of_its_source(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    source.write_bytes(b"weights")
    (tmp_path / "bundle").mkdir()
    placed = place(source, tmp_path / "bundle")
    source.write_bytes(b"other weights")
    assert placed.read_bytes() == b"weights"


def test_a_placed_file_stays_sparse(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    with source.open("wb") as file:
        for at in (0, 5 << 20, 9 << 20):
            file.seek(at)
            file.write(b"weights")
        file.truncate(64 << 20)
    (tmp_path / "bundle").mkdir()
    placed = place(source, tmp_path / "bundle")
    assert placed.read_bytes() == source.read_bytes()
    assert placed.stat().st_blocks <= source.stat().st_blocks


def test_an_empty_file_is_placed(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "bundle").mkdir()
    assert place(tmp_path / "empty", tmp_path / "bundle").read_bytes() == b""


def test_the_target_of_a_symbolic_link_is_placed_under_the_name_of_the_link(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "model.safetensors").symlink_to("blob")
    (tmp_path / "bundle").mkdir()
    placed = place(tmp_path / "model.safetensors", tmp_path / "bundle")
    assert placed.name == "model.safetensors"
    assert not placed.is_symlink()
    assert placed.read_bytes() == b"weights"


def test_a_file_on_another_file_system_is_copied(tmp_path: Path) -> None:
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir() or shared_memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    source = shared_memory / f"tandemrt-{os.getpid()}.safetensors"
    source.write_bytes(b"weights")
    try:
        placed = place(source, tmp_path)
        assert placed.read_bytes() == b"weights"
        assert not placed.samefile(source)
    finally:
        source.unlink()


def test_a_second_build_at_a_path_is_rejected_and_the_first_completes(tmp_path: Path) -> None:
    with staged(tmp_path / "bundle") as folder:
        (folder / "file").write_text("first")
        with pytest.raises(BadBundle, match=r"out must have one builder at a time; another process builds .*bundle"):
            staged(tmp_path / "bundle").__enter__()
        with staged(tmp_path / "other"):
            pass
    assert (tmp_path / "bundle/file").read_text() == "first"
    assert sorted(file_names(tmp_path)) == ["bundle", "other"]


def test_concurrent_builds_leave_one_complete_folder(tmp_path: Path) -> None:
    def build(number: int) -> str:
        try:
            with staged(tmp_path / "bundle") as folder:
                (folder / "file").write_text(str(number))
                assert file_names(folder) == ["file"]
        except BadBundle:
            return "refused"
        return "built"

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(build, range(64)))
    assert set(results) <= {"built", "refused"}
    assert "built" in results
    assert file_names(tmp_path) == ["bundle"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tandemrt.export.staging import staged
with staged(Path(sys.argv[1])) as folder:
    (folder / "file").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_build_removes_leftovers_of_a_killed_one(tmp_path: Path) -> None:
    out = tmp_path / "[a] bundle"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(file_names(tmp_path)) == 1
    (tmp_path / ".[a] bundle.old-12345678").mkdir()
    (tmp_path / ".a bundle.building-12345678").mkdir()
    with staged(out) as folder:
        (folder / "file").write_text("whole")
    assert sorted(file_names(tmp_path)) == [".a bundle.building-12345678", "[a] bundle"]


ENDED = """
import os, signal, sys
from pathlib import Path
from tandemrt.export.staging import staged
with staged(Path(sys.argv[1])) as folder:
    (folder / "file").write_text("half")
    os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_build_that_is_asked_to_end_leaves_no_files(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", ENDED, str(tmp_path / "new/bundle"), str(int(number))]
    ended = subprocess.run(command, check=False, preexec_fn=receive_interrupts)
    assert ended.returncode == 128 + number
    assert file_names(tmp_path) == []


def test_a_build_keeps_the_signal_handlers_of_its_program(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with staged(tmp_path / "bundle"):
            os.kill(os.getpid(), signal.SIGTERM)
        assert (received, file_names(tmp_path)) == ([signal.SIGTERM], ["bundle"])
    finally:
        signal.signal(signal.SIGTERM, before)
    with staged(tmp_path / "other"):
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_build_killed_between_the_renames_restores_the_old_folder(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle").folder.rename(tmp_path / ".bundle.old-12345678")
    with pytest.raises(ValueError, match="no"), staged(tmp_path / "bundle"):
        raise ValueError("no")
    assert Bundle.open(tmp_path / "bundle", verify=True).name == "sample"


def test_a_failed_build_removes_the_folders_it_created(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), staged(tmp_path / "a/b/bundle"):
        raise ValueError("no")
    assert file_names(tmp_path) == []
