"""Writing safetensors files (export/read/checkpoint.py says how they are made up), a piece at a time."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from tandemrt.export.read.checkpoint import DTYPES, StoredTensor, read_header

_CODES = {name: (code, width) for code, (name, width) in DTYPES.items()}


def write_tensors(tensors: Iterable[StoredTensor], file: Path) -> dict[str, StoredTensor]:
    """Write copies of stored tensors to a new ``file``; returns where they lie now, by name."""
    copied = list(tensors)
    with file.open("xb") as out:
        out.write(header((tensor.name, tensor.dtype, tensor.shape) for tensor in copied))
        for tensor in copied:
            copy_bytes(tensor, out)
    return read_header(file)


def header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """What stands in front of ``tensors``, by name, dtype and shape, one behind the other."""
    said, begin = {}, 0
    for name, dtype, shape in tensors:
        code, width = _CODES[dtype]
        end = begin + math.prod(shape) * width
        said[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(said).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def copy_bytes(tensor: StoredTensor, out: BinaryIO, step: int = 1 << 24) -> None:
    """Append the bytes of a stored tensor to ``out``."""
    with tensor.file.open("rb") as source:
        source.seek(tensor.offset)
        for begin in range(0, tensor.nbytes, step):
            out.write(source.read(min(step, tensor.nbytes - begin)))
