"""``tandemrt models``: what is in the cache is listed, and removed unless a process uses it."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tandemrt import LLM
from tandemrt.engines.bundle.lock import builder_lock, locked
from tandemrt.export.staging import sole_builder, staged


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where ``run`` runs commands."""
    return tmp_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def add(cache: Path, name: str, *, kind: str = "bundles", size: int = 1000, built: int = 0) -> Path:
    place = cache / kind / name
    with sole_builder(place, print), staged(place) as folder:
        (folder / "weights").write_bytes(bytes(size))
    os.utime(place, (built, built))
    (cache / kind / f"{name}.toml").touch()
    return place


def test_models_are_listed_with_size_and_date_the_latest_first(run, cache: Path, tmp_path: Path) -> None:
    assert run("models", "list")[1].startswith(f"no model is in {cache}; ")
    add(cache, "tiny-0123456789ab", size=2_500_000, built=10**9)
    add(cache, "other-0123456789ab", kind="gguf", built=10**9 + 86400)
    (cache / "kernels").mkdir()
    (cache / "bundles" / ".tiny-0123456789ab.building-1").mkdir()
    (cache / "bundles" / "linked").symlink_to(tmp_path)
    code, out, _ = run("models", "list")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert code == 0
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("other-0123456789ab", "0.0", "gguf"),
        ("tiny-0123456789ab", "2.5", "bundles"),
    ]
    assert re.fullmatch(r"2001-09-\d\d", rows[1][3])
    assert len({len(line[: line.index(" MB")]) for line in out.splitlines()[1:]}) == 1, "sizes are aligned"


def test_a_model_is_removed_by_its_name_or_a_beginning_that_only_it_has(run, cache: Path) -> None:
    first, second, kept = (add(cache, f"tiny-{digest}") for digest in ("aa1", "ab1", "ab2"))
    assert run("models", "rm", "tiny-aa1")[:2] == (0, "removed tiny-aa1, 0.0 MB\n")
    code, _, err = run("models", "rm", "tiny-a")
    assert code == 2
    assert "BadRequest: NAME: must be one model that `tandemrt models list` prints; 'tiny-a' fits tiny-" in err
    assert run("models", "rm", "tiny-ab1")[0] == 0
    assert [first.exists(), second.exists(), kept.exists()] == [False, False, True]
    assert sorted(path.name for path in (cache / "bundles").iterdir() if path.suffix != ".lock") == [
        "tiny-ab2",
        "tiny-ab2.toml",
    ]
    assert run("models", "rm", "tiny")[0] == 0


@pytest.mark.parametrize("name", ["", ".", "..", "../outside", "linked", "bundles/tiny-aa1", "/", "tinny-aa1"])
def test_nothing_outside_the_cache_is_removed(run, cache: Path, tmp_path: Path, name: str) -> None:
    add(cache, "tiny-aa1")
    (tmp_path / "outside").mkdir()
    (cache / "bundles" / "linked").symlink_to(tmp_path / "outside")
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run("models", "rm", name)
    assert code == 2
    assert "names none" in err
    assert name != "tinny-aa1" or "did you mean 'tiny-aa1'" in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bundle_that_an_llm_has_open_is_not_removed(run, cache: Path, tiny_bundle: Path) -> None:
    place = cache / "bundles" / "tiny-aa1"
    shutil.copytree(tiny_bundle, place)
    with LLM(place, threads=1) as first, LLM(place, threads=1) as second:
        first.close()
        code, _, err = run("models", "rm", "tiny-aa1")
        assert code == 2
        assert "NAME: must not be in use, received 'tiny-aa1'; end the process that has it open" in err
        assert second.generate("x").text is not None
    del first, second
    assert run("models", "rm", "tiny-aa1")[0] == 0
    assert not place.exists()


def test_a_model_that_is_being_built_or_read_is_not_removed(run, cache: Path) -> None:
    place = add(cache, "tiny-aa1", kind="gguf")
    for lock, shared in ((builder_lock(place), False), (place, True)):
        with locked(lock, shared=shared) as holds:
            assert holds
            assert run("models", "rm", "tiny-aa1")[0] == 2
    assert place.exists()
    assert run("models", "rm", "tiny-aa1")[0] == 0


def test_places_whose_names_differ_after_a_point_have_different_locks(tmp_path: Path) -> None:
    assert builder_lock(tmp_path / "qwen3-0.6b") != builder_lock(tmp_path / "qwen3-0.8b")


def test_the_next_build_removes_what_an_interrupted_removal_left(cache: Path) -> None:
    place = add(cache, "tiny-aa1")
    place.rename(leftover := place.with_name(".tiny-aa1.building-removed"))
    add(cache, "tiny-aa1")
    assert not leftover.exists()
