"""Validate saved graphs, and optimize those that run on a CPU, so that opening a bundle does not have to."""

import errno
import shutil
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import onnx

from tandemrt.engines.bundle.manifest import SharedWeight
from tandemrt.engines.contract.dtypes import from_onnx
from tandemrt.engines.recipe.backends import CPU
from tandemrt.engines.validation.errors import BackendUnavailable, InternalError
from tandemrt.engines.validation.extras import pip_install
from tandemrt.engines.validation.system_errors import system_advice
from tandemrt.plugins.onnxruntime.custom_operators import ON_CPUS, load_into
from tandemrt.plugins.onnxruntime.sessions import session_options
from tandemrt.plugins.operators.constants import DOMAIN

_MAX_CONSTANTS = 16 << 20  # bytes that constant folding may add to a graph file; a rotary table has one or a few MB


def require_session(path: Path, *, optimize: bool = True) -> bool:
    """Open a graph and its weights on onnxruntime's CPU provider. ``optimize``: save what its optimizer makes of it.

    Returns whether the file is optimized now. It is not where optimization would copy weights into the graph, such as
    float32 values of weights in another dtype. Graphs in half precision must stay: their optimized form gave other
    logits when it was opened. Raises BackendUnavailable without onnxruntime, InternalError if onnxruntime rejects the
    graph, or what its optimizer makes of it.
    """
    try:
        import onnxruntime
    except ImportError as error:
        rule = f"backend {CPU} needs onnxruntime to check what it built"
        raise BackendUnavailable(f"{rule}: {pip_install('cpu')}") from error
    optimized = path.with_suffix(".optimized")
    options = session_options()
    # The next level depends on the processor.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    if optimize:
        options.optimized_model_filepath = str(optimized)
    load_into(options, path)
    try:
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        if not (optimize and _is_worth_keeping(path, optimized)):
            return False
        optimized.write_bytes(_completed(optimized, path).SerializeToString())
        _require_opens(optimized)
        optimized.replace(path)
        return True
    except Exception as error:  # onnxruntime's exceptions have no common base but this
        if shutil.disk_usage(path.parent).free < path.stat().st_size:  # its error does not name the cause
            advice: str | None = system_advice(OSError(errno.ENOSPC, ""))
        else:
            advice = system_advice(error)
        if advice is not None:
            raise BackendUnavailable(f"onnxruntime cannot optimize {path}: {advice}") from error
        raise InternalError(f"onnxruntime {onnxruntime.__version__} rejects {path.name}: {error}") from error
    finally:
        optimized.unlink(missing_ok=True)


def mapped_weights(path: Path, folder: Path) -> dict[str, SharedWeight]:
    """Return the weights, by name, that kernels of the project read where a file of the bundle in ``folder`` is mapped.

    onnxruntime copies the weights of most of its own kernels, so it reads those itself.
    """
    graph = onnx.load(path, load_external_data=False).graph
    read = {name for node in graph.node if node.domain == DOMAIN and node.op_type in ON_CPUS for name in node.input}
    weights = {}
    for tensor in graph.initializer:
        if tensor.name in read and tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            weights[tensor.name] = SharedWeight(
                file=(path.parent / entries["location"]).relative_to(folder).as_posix(),
                offset=int(entries.get("offset", 0)),
                dtype=from_onnx(tensor.data_type),
                shape=tuple(tensor.dims),
            )
    return weights


def _is_worth_keeping(path: Path, optimized: Path) -> bool:
    return optimized.stat().st_size <= path.stat().st_size + _MAX_CONSTANTS


def _require_opens(path: Path) -> None:
    """Open an optimized graph as the runtime does, which finds what the optimizer wrote wrongly."""
    import onnxruntime

    options = session_options(entries={"session.disable_prepacking": "1"})
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    load_into(options, path)
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _completed(optimized: Path, path: Path) -> onnx.ModelProto:
    """Return the optimized form of the graph in ``path`` with all that a session needs that loads it."""
    before, after = (onnx.load(each, load_external_data=False) for each in (path, optimized))
    # onnxruntime drops functions of operators with a kernel. A machine without a compiler needs them.
    for fields in ("functions", "opset_import"):
        after.ClearField(fields)
        getattr(after, fields).extend(getattr(before, fields))
    after.graph.ClearField("value_info")  # types and shapes, which a session that loads them only compares
    _rename_repeated(after.graph, {}, set())
    return after


def _rename_repeated(graph: onnx.GraphProto, outer: Mapping[str, str], used: set[str]) -> None:
    """Give every value of a graph and of its subgraphs a name of its own.

    onnxruntime's optimizer looks for a free name in one graph only, and rejects a name of two nested graphs.
    ``outer``: the new names of values of the graphs around this one. ``used``: all names so far.
    """
    used |= {value.name for values in (graph.input, graph.initializer) for value in values}
    names = dict(outer)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for name in filter(None, node.output):
            names[name] = next(each for each in _candidates(name) if each not in used)
            used.add(names[name])
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _rename_repeated(inner, names, used)
    for value in graph.output:
        value.name = names.get(value.name, value.name)


def _candidates(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{number}" for number in count(2))
