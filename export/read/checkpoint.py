"""Open a Hugging Face checkpoint folder: read config.json and the headers of its safetensors files, but no weights.

The safetensors format: 8 bytes with the header's length (little endian), the header (JSON: name -> dtype, shape and
the half-open range of its bytes, counted from the end of the header), then the bytes of all tensors without gaps.
https://huggingface.co/docs/safetensors
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import BadCheckpoint, clipped, quoted
from tandemrt.export.read.file_formats import require_safetensors

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
GGUF_INDEX = "model.gguf.json"  # name -> file, its size and time, shape and offset, of tensors that stay in GGUF files
_HEADER_LIMIT = 100_000_000  # the limit of the format's own reader


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: ``nbytes`` bytes at ``offset`` of ``file``, counted from the start of the file.

    ``transposed``: the file stores the matrix as [inputs, outputs]; the usual order is [outputs, inputs]. ``columns``:
    the tensor is a range of the columns of a matrix, whose ``nbytes`` these are: the first one, and the number of all.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    transposed: bool = False
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """The config and the tensor directory of a checkpoint folder.

    ``files``: its safetensors files, sorted by name, and the GGUF files that hold tensors of it.

    ``stored_names``: the names that the files had for modules, such as "model.layers.0.mlp", which have other names
    here.
    """

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]
    stored_names: Mapping[str, str] = field(default_factory=dict)

    def names_of(self, module: str) -> tuple[str, ...]:
        """Return the name of a module, and the one that it had in the files if that differs."""
        stored = self.stored_names.get(module, module)
        return (module,) if stored == module else (module, stored)

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read the folder's config and headers. Raises BadCheckpoint for missing, damaged or contradictory files."""
        folder = Path(folder)
        if not folder.is_dir():
            raise BadCheckpoint(f"checkpoint: {folder} is not a folder; give the folder that holds config.json")
        require_safetensors(folder)
        config = read_json(folder / "config.json")
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if single.exists() or not index.exists():
            in_gguf = _in_gguf_files(folder)
            files = (single, *sorted({tensor.file for tensor in in_gguf.values()}))
            return cls(folder, config, read_header(single) | in_gguf, files)
        shards = read_index(index)
        tensors: dict[str, StoredTensor] = {}
        for file in sorted(set(shards.values())):
            tensors.update(read_header(folder / file))
        for name, file in shards.items():
            if name not in tensors or tensors[name].file.name != file:
                raise BadCheckpoint(
                    f"{index}: tensor {quoted(name)} should be in {file}, which does not hold it; download "
                    "that shard again"
                )
        return cls(folder, config, tensors, tuple(folder / file for file in sorted(set(shards.values()))))

    def read(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> npt.NDArray[Any]:
        """Return the values of a small tensor. Raises BadCheckpoint unless it has ``shape`` and one of ``dtypes``."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype not in dtypes:
            actual = "missing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
            raise BadCheckpoint(
                f"{self.folder}: tensor {quoted(name)} should be {' or '.join(dtypes)}{list(shape)}, it is {actual}"
            )
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset)
            return np.frombuffer(stream.read(tensor.nbytes), tensor.dtype).reshape(shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file, checked against the file's size. Raises BadCheckpoint."""
    if not file.is_file():
        raise BadCheckpoint(f"{file} is missing; the checkpoint needs it, download it again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise BadCheckpoint(
                f"{file}: the header should be {length} bytes long, the file has {size} in all; it is truncated or "
                "not a safetensors file, download it again"
            )
        header = _parse(stream.read(length), file)
    header.pop("__metadata__", None)
    tensors = {name: _stored(name, entry, file, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            raise BadCheckpoint(
                f"{file}: tensor {quoted(tensor.name)} should begin at byte {end}, it begins at {tensor.offset}"
            )
        end += tensor.nbytes
    if end != size:
        kind = "truncated" if end > size else "longer than its header says"
        raise BadCheckpoint(f"{file}: should have {end} bytes, it has {size}; it is {kind}, download it again")
    return tensors


def gguf_index_entry(tensor: StoredTensor) -> dict[str, Any]:
    """Return the entry of the GGUF index for a tensor of bytes."""
    stat = tensor.file.stat()
    place = {"offset": tensor.offset, "shape": list(tensor.shape)}
    return {"file": str(tensor.file), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, **place}


def _in_gguf_files(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors that the folder of an unpacked GGUF file left there. Raises BadCheckpoint if one changed."""
    path = folder / GGUF_INDEX
    tensors: dict[str, StoredTensor] = {}
    for name, entry in (read_json(path) if path.exists() else {}).items():
        file, shape = Path(entry["file"]), tuple(entry["shape"])
        tensors[name] = StoredTensor(name, "uint8", shape, file, entry["offset"], math.prod(shape))
        if not file.is_file() or gguf_index_entry(tensors[name]) != entry:
            raise BadCheckpoint(f"{file}: should be the file that was unpacked into {folder}; unpack it again")
    return tensors


def _stored(name: str, entry: Any, file: Path, start: int) -> StoredTensor:
    try:
        dtype, width = DTYPES[entry["dtype"]]
        shape = tuple(int(dim) for dim in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(
            f"{file}: the header entry of tensor {quoted(name)} should have a known dtype, a shape and two "
            f"data_offsets, it is {quoted(entry)}"
        ) from error
    if begin < 0 or any(dim < 0 for dim in shape) or end - begin != math.prod(shape) * width:
        raise BadCheckpoint(
            f"{file}: tensor {quoted(name)} of {dtype}{list(shape)} should take {math.prod(shape) * width} bytes, "
            f"its data_offsets are [{begin}, {end}]"
        )
    return StoredTensor(name, dtype, shape, file, start + begin, end - begin)


def read_index(path: Path) -> dict[str, str]:
    """Return tensor name -> file name from the index of a sharded checkpoint. Raises BadCheckpoint if it is invalid."""
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(file, str) for file in shards.values()):
        raise BadCheckpoint(f"{path}: weight_map should map tensor names to file names, it is {quoted(shards)}")
    outside = sorted(file for file in set(shards.values()) if Path(file).name != file)
    if outside:
        raise BadCheckpoint(f"{path}: shards should be in the index's folder, it names {quoted(outside[0])}")
    return shards


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint. Raises BadCheckpoint."""
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing; the checkpoint needs it, download it again")
    return _parse(path.read_bytes(), path)


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: should hold JSON: {clipped(error)}; download it again") from error
    if not isinstance(parsed, dict):
        raise BadCheckpoint(f"{path}: should hold a JSON object, it holds a {type(parsed).__name__}")
    return parsed
