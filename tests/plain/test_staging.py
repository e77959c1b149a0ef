"""A bundle folder appears whole or not at all, and only ever takes the place of a bundle."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.errors import BadBundle
from tandemrt.export.staging import check_destination, place, staged
from tests.plain.test_bundle import edit, write_bundle


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_folder_appears_when_the_work_is_done(tmp_path: Path) -> None:
    with staged(tmp_path / "new/bundle") as folder:
        (folder / "file").write_text("content")
        assert not (tmp_path / "new/bundle").exists()
    assert (tmp_path / "new/bundle/file").read_text() == "content"
    assert names(tmp_path / "new") == ["bundle"]


def test_a_folder_that_appears_is_as_readable_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with staged(tmp_path / "bundle"):
        pass
    assert (tmp_path / "bundle").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_old_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    with staged(tmp_path / "bundle") as folder:
        (folder / "file").write_text("new")
        assert (tmp_path / "bundle/bundle.json").exists()
    assert names(tmp_path / "bundle") == ["file"]
    assert names(tmp_path) == ["bundle"]


@pytest.mark.parametrize("interruption", [ValueError, KeyboardInterrupt])
def test_an_interruption_leaves_the_old_folder_and_nothing_else(
    tmp_path: Path, interruption: type[BaseException]
) -> None:
    old = write_bundle(tmp_path / "bundle")

    def work() -> None:
        with staged(tmp_path / "bundle") as folder:
            (folder / "file").write_text("half")
            raise interruption

    with pytest.raises(interruption):
        work()
    assert old.problems(verify=True) == []
    assert names(tmp_path) == ["bundle"]


def test_a_symbolic_link_keeps_pointing_where_it_did(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with staged(tmp_path / "link") as folder:
        (folder / "file").write_text("")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real/file").exists()


def test_a_bundle_of_the_same_name_an_empty_folder_and_a_free_place_may_be_taken(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    (tmp_path / "empty").mkdir()
    for place_name in ("bundle", "empty", "free"):
        check_destination(tmp_path / place_name, "sample", force=False)


def test_a_bundle_of_another_name_is_given_up_only_with_force(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    with pytest.raises(BadBundle, match=r"is 'sample', not 'other'\. Use --force or another --out"):
        check_destination(tmp_path / "bundle", "other", force=False)
    check_destination(tmp_path / "bundle", "other", force=True)


def test_a_bundle_that_cannot_be_read_is_given_up_only_with_force(tmp_path: Path) -> None:
    edit(write_bundle(tmp_path / "bundle").folder, "manifest_version", value=9)
    with pytest.raises(BadBundle, match="cannot be read; replace it with --force"):
        check_destination(tmp_path / "bundle", "sample", force=False)
    check_destination(tmp_path / "bundle", "sample", force=True)


def test_a_bundle_that_an_earlier_version_built_is_replaced_if_the_name_is_the_same(tmp_path: Path) -> None:
    edit(write_bundle(tmp_path / "bundle").folder, "manifest_version", value=1)
    check_destination(tmp_path / "bundle", "sample", force=False)
    with pytest.raises(BadBundle, match="is 'sample', not 'other'"):
        check_destination(tmp_path / "bundle", "other", force=False)


@pytest.mark.parametrize("force", [False, True])
def test_anything_that_is_not_a_bundle_is_never_given_up(tmp_path: Path, force: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/thesis.tex").write_text("")
    for place_name in ("folder", "folder/thesis.tex"):
        with pytest.raises(BadBundle, match=r"out must be free or hold a bundle; .* Choose another place with --out"):
            check_destination(tmp_path / place_name, "sample", force=force)


@pytest.mark.parametrize("inside", ["bundle/target", "bundle/new/one"])
def test_a_place_inside_another_bundle_is_refused(tmp_path: Path, inside: str) -> None:
    write_bundle(tmp_path / "bundle")
    with pytest.raises(BadBundle, match=r"out must not be inside a bundle; .*/bundle is one\. Choose another place"):
        check_destination(tmp_path / inside, "sample", force=True)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadBundle, match=r"out must be in a folder that can be written; .*/file: Not a directory"):
        staged(tmp_path / "file/bundle").__enter__()


def test_a_placed_file_is_no_longer_its_source(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    source.write_bytes(b"weights")
    (tmp_path / "bundle").mkdir()
    placed = place(source, tmp_path / "bundle")
    source.write_bytes(b"other weights")
    assert placed.read_bytes() == b"weights"


def test_a_placed_file_keeps_its_holes(tmp_path: Path) -> None:
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


def test_the_file_behind_a_symbolic_link_is_placed_under_the_links_name(tmp_path: Path) -> None:
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


def test_a_second_builder_at_a_place_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    with staged(tmp_path / "bundle") as folder:
        (folder / "file").write_text("first")
        with pytest.raises(BadBundle, match=r"out must have one builder at a time; another process builds .*bundle"):
            staged(tmp_path / "bundle").__enter__()
        with staged(tmp_path / "other"):
            pass
    assert (tmp_path / "bundle/file").read_text() == "first"
    assert sorted(names(tmp_path)) == ["bundle", "other"]


def test_builders_that_begin_together_never_lose_their_folder(tmp_path: Path) -> None:
    def build(number: int) -> str:
        try:
            with staged(tmp_path / "bundle") as folder:
                (folder / "file").write_text(str(number))
                assert names(folder) == ["file"]
        except BadBundle:
            return "refused"
        return "built"

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(build, range(64)))
    assert set(results) <= {"built", "refused"}
    assert "built" in results
    assert names(tmp_path) == ["bundle"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tandemrt.export.staging import staged
with staged(Path(sys.argv[1])) as folder:
    (folder / "file").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    out = tmp_path / "[a] bundle"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 1
    (tmp_path / ".[a] bundle.old-12345678").mkdir()
    (tmp_path / ".a bundle.building-12345678").mkdir()
    with staged(out) as folder:
        (folder / "file").write_text("whole")
    assert sorted(names(tmp_path)) == [".a bundle.building-12345678", "[a] bundle"]


def test_a_build_that_was_killed_between_the_renames_gives_the_old_folder_back(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle").folder.rename(tmp_path / ".bundle.old-12345678")
    with pytest.raises(ValueError, match="no"), staged(tmp_path / "bundle"):
        raise ValueError("no")
    assert Bundle.open(tmp_path / "bundle", verify=True).name == "sample"


def test_a_failure_leaves_no_folder_that_was_made_for_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), staged(tmp_path / "a/b/bundle"):
        raise ValueError("no")
    assert names(tmp_path) == []
