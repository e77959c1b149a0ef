"""A bundle's weights that change in place neither end the process nor change the texts of a running LLM."""

import gc
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.validation.errors import BadBundle, BadRequest
from tandemrt.runtime.device.mapped_weights import MappedWeights, copy_mappings
from tandemrt.runtime.llm.llm import LLM
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux")

WEIGHTS, TILES = "target/model.safetensors", "target/tiles.safetensors"
CHANGES = {
    "truncated": "os.truncate(sys.argv[1], 100)",
    "overwritten": "open(sys.argv[1], 'r+b').write(bytes(os.path.getsize(sys.argv[1])))",
}
# A change that arrives while leases are held; a file that has a writer, which the kernel leases to no reader; a process
# in which no thread can watch the leases.
SITUATIONS = {
    "leased": "",
    "another writer": "writers = [open(each, 'r+b') for each in weights]",
    "no thread": """
import threading
start = threading.Thread.start
def refusing(thread):
    if thread.name == "tandemrt-weights":
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = refusing
""",
}
CHILD = """
import json, subprocess, sys
changed, other, situation, change = sys.argv[1:]
weights = [f"{changed}/target/{name}.safetensors" for name in ("model", "tiles")]
from tandemrt import LLM, SamplingParams
exec(situation)
params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
ask = lambda llm: llm.generate([list(range(5, 60)), list(range(60, 90))], params)
with LLM(changed, threads=1) as first, LLM(other, threads=1) as second:
    before = [[output.token_ids for output in ask(llm)] for llm in (first, second)]
    for each in weights:
        subprocess.run([sys.executable, "-c", f"import os, sys; {change}", each], check=True)
    after = [[output.token_ids for output in ask(llm)] for llm in (first, second)]
print(json.dumps([before, after]))
"""


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A bundle that a test may damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_texts_stay_the_same_after_weights_change_in_place(
    copy: Path, tiny_bundle: Path, situation: str, change: str
) -> None:
    files = [copy / WEIGHTS, copy / TILES]
    originals = [file.read_bytes() for file in files]
    child = [sys.executable, "-c", CHILD, str(copy), str(tiny_bundle), SITUATIONS[situation], CHANGES[change]]
    done = subprocess.run(child, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    assert before == after
    assert before[0] == before[1]
    assert not [file for file, original in zip(files, originals, strict=True) if file.read_bytes() == original]
    assert ("another process is changing" in done.stderr) == (situation == "leased")


def test_a_file_that_was_truncated_after_its_check_is_refused(copy: Path) -> None:
    bundle = Bundle.open(copy)
    os.truncate(copy / WEIGHTS, 100)
    with pytest.raises(BadBundle, match=r"model.safetensors: must have \d+ bytes, it has 100"):
        MappedWeights(bundle)
    assert open_files(copy) == []


@pytest.mark.parametrize("closed", [True, False])
def test_an_llm_that_is_closed_or_collected_holds_no_file(copy: Path, closed: bool) -> None:
    llm = LLM(copy, device="cpu", threads=1)
    names = sorted(path.name for path in open_files(copy))
    # The folder's lock; the leases of target and draft; a mapping of tiles has a descriptor too.
    assert names == ["bundle"] + ["model.safetensors"] * 2 + ["tiles.safetensors"] * 4
    if closed:
        llm.close()
    del llm
    gc.collect()
    assert eventually(lambda: not open_files(copy))


def test_an_llm_that_fails_to_open_holds_no_file(ngram_bundle: Path) -> None:
    with pytest.raises(BadRequest, match="draft_masks: needs a draft"):
        LLM(ngram_bundle, device="cpu", threads=1, draft_masks=True)
    assert eventually(lambda: not open_files(ngram_bundle))


def test_mapped_bytes_stay_readable_while_and_after_they_are_copied(tmp_path: Path) -> None:
    file = tmp_path / "name with a space\nand a line"
    content = os.urandom(1 << 20) * 9 + b"a last page that is not full"
    file.write_bytes(content)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        stop, wrong = threading.Event(), list[int]()

        def read() -> None:
            while not stop.is_set():
                wrong.extend(at for at in range(0, len(content), 4096) if mapped[at] != content[at])

        reader = threading.Thread(target=read)
        reader.start()
        assert copy_mappings(str(file)) == -(-len(content) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.truncate(file, 0)
        stop.set()
        reader.join()
        assert wrong == []
        assert mapped[:] == content
        assert copy_mappings(str(file)) == 0


def open_files(folder: Path) -> list[Path]:
    """The files in ``folder`` that this process has open."""
    paths = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            path = descriptor.readlink()
        except OSError:  # of the listing itself
            continue
        paths += [path] if path.is_relative_to(folder.resolve()) else []
    return paths
