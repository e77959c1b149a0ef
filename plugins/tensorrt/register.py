"""Register operators in TensorRT's plugin registry, in the ahead-of-time form of ``tensorrt.plugin``.

TensorRT validates Python signatures, so each function gets the signature of its operator: a ``TensorDesc`` per input.
There is no tuning function: each operator has one kernel, linear formats, and the dtypes of the strongly typed network.
"""

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from types import GenericAlias
from typing import Any

from tandemrt.engines.contract.dtypes import KERNEL_SUFFIX
from tandemrt.engines.contract.operators import T
from tandemrt.plugins.operators.constants import DOMAIN
from tandemrt.plugins.tensorrt.bindings import DATA_TYPES
from tandemrt.plugins.tensorrt.modules import load_builder
from tandemrt.plugins.tensorrt.operators import Plugin


def register(plugins: Iterable[Plugin]) -> None:
    """Register ``plugins`` under the namespace ``tandemrt``, version "1"; a second call does nothing.

    TensorRT's parser turns a node of ``verify.onnx`` into a plugin only if the plugin is registered. Raises
    BackendUnavailable if TensorRT's Python package is missing or of another major version.
    """
    plugin = _plugin_module()
    known = getattr(plugin.op, DOMAIN, None)
    for operator in plugins:
        if operator.name not in vars(known or object):
            _register(operator, plugin)


def _register(operator: Plugin, plugin: Any) -> None:
    identifier = f"{DOMAIN}::{operator.name}"
    outputs = GenericAlias(tuple, (plugin.TensorDesc,) * len(operator.outputs))
    compiled = GenericAlias(tuple, (str, str, plugin.KernelLaunchParams, plugin.SymIntExprs))
    describe, implement = _describe(operator, plugin), _implement(operator, plugin)
    plugin.register(identifier)(_signed(describe, operator, plugin, returns=outputs))
    plugin.aot_impl(identifier)(_signed(implement, operator, plugin, returns=compiled, outputs=outputs, tactic=int))


def _describe(operator: Plugin, plugin: Any) -> Callable[..., Any]:
    """Return the function that describes the outputs; TensorRT calls it while it defines a network."""

    def describe(*inputs: Any) -> Any:
        dtype = _checked(operator, inputs)
        shapes = operator.output_shapes({b.name: d.shape_expr for b, d in zip(operator.inputs, inputs, strict=True)})
        dtypes = [_dtypes()[dtype if binding.dtype == T else binding.dtype] for binding in operator.outputs]
        return tuple(plugin.from_shape_expr(*pair) for pair in zip(shapes, dtypes, strict=True))

    return describe


def _implement(operator: Plugin, plugin: Any) -> Callable[..., Any]:
    """Return the function that gives kernel and launch; TensorRT calls it while it builds an engine."""

    def implement(*inputs_outputs_tactic: Any) -> Any:
        inputs = inputs_outputs_tactic[: len(operator.inputs)]
        dtype = _checked(operator, inputs)
        launch = operator.launch({b.name: d.shape_expr for b, d in zip(operator.inputs, inputs, strict=True)})
        x, y, z = launch.grid
        parameters = plugin.KernelLaunchParams(grid_x=x, grid_y=y, grid_z=z, block_x=launch.threads)
        scalars = plugin.SymIntExprs.from_tuple(tuple(plugin.SymInt32(value) for value in launch.scalars))
        return operator.kernel(dtype), operator.ptx(dtype), parameters, scalars

    return implement


def _signed(function: Callable[..., Any], operator: Plugin, plugin: Any, *, returns: Any, **more: Any) -> Any:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    arguments = {binding.name: plugin.TensorDesc for binding in operator.inputs} | more
    parameters = [inspect.Parameter(name, kind, annotation=each) for name, each in arguments.items()]
    function.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return function


def _checked(operator: Plugin, inputs: tuple[Any, ...]) -> str:
    """Return the dtype of the logits. Raises ValueError for wrong types: a kernel sees only addresses."""
    names = {dtype: name for name, dtype in _dtypes().items()}
    input_dtypes = {b.name: names.get(d.dtype, str(d.dtype)) for b, d in zip(operator.inputs, inputs, strict=True)}
    for binding, tensor in zip(operator.inputs, inputs, strict=True):
        dtypes = tuple(KERNEL_SUFFIX) if binding.dtype == T else (binding.dtype,)
        if input_dtypes[binding.name] not in dtypes or tensor.ndim != len(binding.shape):
            raise ValueError(
                f"{DOMAIN}::{operator.name}: {binding.name} must be {' or '.join(dtypes)} with {len(binding.shape)} "
                f"dimensions, got {input_dtypes[binding.name]} with {tensor.ndim}; build the graph with tandemrt export"
            )
    return next(input_dtypes[binding.name] for binding in operator.inputs if binding.dtype == T)


def _plugin_module() -> Any:
    load_builder("tensorrt")
    return import_module("tensorrt.plugin")


def _dtypes() -> dict[str, Any]:
    import tensorrt

    return {name: getattr(tensorrt.DataType, written) for name, written in DATA_TYPES.items()}
