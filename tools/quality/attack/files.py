"""Attacks by a model's files that another person made: chat templates and GGUF files."""

import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from tandemrt.engines.text.chat_template import ChatTemplate
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.quantize.gguf.checkpoint import read_gguf
from tools.quality.attack.frontends import refused

MAX_PEAK_MB = 500.0  # that reading a template may add to the memory of a process
_CONSTANT = "{% if false %}{{ ('a' * 10**5) | center(10**9) }}{% endif %}"  # 1 GB that is never rendered
_ARRAY, _BYTE = 9, 0  # types of GGUF values
_ONE_AT_A_TIME = Lock()  # the peak of memory is that of the process


def model_file_attacks() -> dict[str, Callable[[], str]]:
    """Return attacks by files of a model. Each raises RuntimeError if the file is read as an attacker wants it."""
    return {
        "a template with a constant of 1 GB": _read_template,
        "a GGUF file of arrays 5,000 deep": lambda: _gguf([(_ARRAY, 1)] * 4999 + [(_BYTE, 1)], b"\1"),
        "a GGUF file with an array of 3,000,000 items": lambda: _gguf([(_BYTE, 3_000_000)], bytes(3_000_000)),
    }


def _read_template() -> str:
    """Read a template as an exporter and a server do. Raises RuntimeError if its constant is computed."""
    with _ONE_AT_A_TIME:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before = _peak_mb()
        template = ChatTemplate(_CONSTANT + "{{ messages[0].content }}", {})
        unread = dict.fromkeys({"unread"} - template.variables, 1)
        text = template.render(template.values([{"role": "user", "content": "x"}], variables=unread))
        peak = _peak_mb() - before
    if peak > MAX_PEAK_MB:
        raise RuntimeError(f"the template took {peak:.0f} MB")
    return text


def _peak_mb() -> float:
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return int(peak[1]) / 1024


def _gguf(heads: list[tuple[int, int]], values: bytes) -> str:
    """Read a GGUF file with one key: nested arrays of the types and counts ``heads``."""
    key = b"general.x"
    head = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key + struct.pack("<I", _ARRAY)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.gguf")
        file.write_bytes(head + b"".join(struct.pack("<IQ", kind, count) for kind, count in heads) + values)
        try:
            read_gguf(file)
        except BadCheckpoint as error:
            if "array" in str(error):
                return refused(str(error))
    raise RuntimeError("the arrays were read")
