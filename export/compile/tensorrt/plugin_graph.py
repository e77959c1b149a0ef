"""Graphs of the project's operators for a TensorRT of another interpreter, which has them as plugins in C++."""

from pathlib import Path
from typing import NamedTuple

import onnx

from tandemrt.plugins.operators.constants import DOMAIN
from tandemrt.plugins.tensorrt.library import compile_library
from tandemrt.plugins.tensorrt.operators import PLUGINS

_WITH_INT64 = 10  # the first major version of TensorRT that has int64


class PluginGraph(NamedTuple):
    """A graph to parse and the libraries of its plugins.

    ``pairs``: the release has no int64, so such inputs and outputs are declared as pairs of int32, the same bytes.
    """

    path: Path
    libraries: tuple[Path, ...] = ()
    pairs: bool = False


def with_plugins(onnx_path: Path, folder: Path, headers: str | None, *, release: str) -> PluginGraph:
    """Prepare ``onnx_path`` for TensorRT ``release``, in ``folder``. Raises as ``compile_library`` does.

    A graph without operators of the project remains as it is.
    """
    model = onnx.load(onnx_path, load_external_data=False)
    if headers is None or not any(node.domain == DOMAIN for node in model.graph.node):
        return PluginGraph(onnx_path)
    library = compile_library(PLUGINS, Path(headers), folder, release=release)
    del model.functions[:]  # the parser would take them for the plugins
    pairs = int(release.split(".")[0]) < _WITH_INT64
    if pairs:
        _pair_int64(model.graph)
    onnx.save(model, folder / onnx_path.name)
    return PluginGraph(folder / onnx_path.name, (library,), pairs)


def _pair_int64(graph: onnx.GraphProto) -> None:
    """Declare int64 inputs and outputs as pairs of int32."""
    for value in (*graph.input, *graph.output):
        tensor = value.type.tensor_type
        if tensor.elem_type == onnx.TensorProto.INT64:
            tensor.elem_type = onnx.TensorProto.INT32
            tensor.shape.dim.add().dim_value = 2
