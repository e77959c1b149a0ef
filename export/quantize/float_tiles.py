"""Write the unquantized matmul weights of a checkpoint in tiles, for the operator ``tiled_matmul`` on a CPU.

onnxruntime would copy every weight in its kernels' order whenever a graph loads. A process maps tiles instead, and
processes share them.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from tandemrt.engines.options.build_listener import Progress
from tandemrt.export.graph.weights import tiles_name
from tandemrt.export.quantize.matmuls import groups, matmul_modules, place
from tandemrt.export.quantize.writer import Entry, write_safetensors
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor, read_header
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import with_graph_names
from tandemrt.export.read.values import read_values
from tandemrt.plugins.operators.float_tiles import tiled, tiled_shape

FILE = "tiles.safetensors"
_DTYPES = ("float32", "float16", "bfloat16")


def write_tiles(checkpoint: Checkpoint, spec: ModelSpec, folder: Path, progress: Progress | None) -> Checkpoint:
    """Write the weights to a file in ``folder``, in their dtype; return the checkpoint with these tensors added.

    One matrix is in memory at a time.
    """
    tensors = sorted(_weights(checkpoint, spec), key=lambda tensor: place(tensor.name.removesuffix(".weight")))
    # The graph may join the weights of a group in one matmul, so they are next to each other.
    entries = [_entry(tensor) for group in groups(tensors, _module, lambda tensor: tensor.dtype) for tensor in group]
    if not entries:
        return checkpoint
    file = folder / FILE
    write_safetensors(file, entries, progress=progress)
    return replace(checkpoint, tensors={**checkpoint.tensors, **read_header(file)})


def _weights(checkpoint: Checkpoint, spec: ModelSpec) -> Iterator[StoredTensor]:
    named, quantization = with_graph_names(checkpoint, spec), read_quantization(checkpoint.config, checkpoint.folder)
    for module in matmul_modules(named, spec):
        tensor = named.tensors.get(f"{module}.weight")
        if tensor is None or (quantization is not None and quantization.scheme(*named.names_of(module)) is not None):
            continue
        if tensor.dtype in _DTYPES and len(tensor.shape) == 2:
            yield tensor


def _entry(tensor: StoredTensor) -> Entry:
    width, inner = tensor.shape[::-1] if tensor.transposed else tensor.shape
    return Entry(tiles_name(tensor.name), tensor.dtype, tiled_shape(width, inner), partial(_tiles, tensor))


def _tiles(tensor: StoredTensor) -> Iterator[bytes]:
    matrix = read_values(tensor)
    if matrix.itemsize == 2:  # moved as integers, which numpy moves fastest
        matrix = matrix.view(np.uint16)
    yield tiled(matrix.T if tensor.transposed else matrix).tobytes()


def _module(tensor: StoredTensor) -> str:
    return tensor.name.removesuffix(".weight")
