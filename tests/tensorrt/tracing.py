"""Drive a plugin through the calls of TensorRT's builder, with symbolic shapes, and record its answers.

The plugin, its creator and everything they call are TensorRT's. This module replaces the builder, which the stand-in
lacks: an expression builder (a subclass of TensorRT's own interface) whose expressions can be evaluated. Two of
TensorRT's types can only be read by the builder's C++ and get a readable form: ``DimsExprs`` and ``SymExprImpl``.
"""

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import tensorrt as trt
from tensorrt.plugin import _tensor

_OPERATIONS = {
    trt.DimensionOperation.SUM: lambda a, b: a + b,
    trt.DimensionOperation.PROD: lambda a, b: a * b,
    trt.DimensionOperation.SUB: lambda a, b: a - b,
    trt.DimensionOperation.FLOOR_DIV: lambda a, b: a // b,
    trt.DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
}


class Expression(trt.IDimensionExpr):
    """An integer, a symbol, or an operation on two expressions."""

    @classmethod
    def of(cls, *parts: Any) -> "Expression":
        self = cls.__new__(cls)  # the interface has no Python constructor: the builder creates instances
        self.parts = parts
        return self

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        if len(self.parts) == 1:
            return sizes.get(self.parts[0], self.parts[0])
        operation, first, second = self.parts
        return _OPERATIONS[operation](first.evaluate(sizes), second.evaluate(sizes))

    def is_constant(self) -> bool:
        return len(self.parts) == 1 and isinstance(self.parts[0], int)

    def get_constant_value(self) -> int:
        return self.parts[0]


class ExpressionBuilder(trt.IExprBuilder):
    def constant(self, value: int) -> Expression:
        return Expression.of(value)

    def operation(self, operation: Any, first: Expression, second: Expression) -> Expression:
        return Expression.of(operation, first, second)


class _ReadableDims(list):
    """``DimsExprs`` holds addresses of C++ expressions."""

    def __init__(self, size: int) -> None:
        super().__init__([None] * size)


class _ReadableScalar(_tensor.SymExprImpl):
    """``ISymExpr`` can be written from Python but not read."""

    def __init__(self, expression: Any) -> None:
        super().__init__(expression)
        self.kind, self.source = type(expression), expression._expr


@dataclass
class Answers:
    """The answers of a plugin to the builder. Numbers are expressions."""

    output_types: list[Any] = field(default_factory=list)
    output_shapes: list[list[Expression]] = field(default_factory=list)
    formats: list[Any] = field(default_factory=list)
    launch: Any = None
    scalars: Any = None
    kernel: str = ""
    code: bytes = b""


class _Recorder:
    """Accepts attributes and items, as the builder's launch parameters do."""

    def __init__(self) -> None:
        self.items: dict[int, _ReadableScalar] = {}

    def __setitem__(self, index: int, value: _ReadableScalar) -> None:
        self.items[index] = value


def create(name: str, namespace: str = "tandemrt", request: str = "UNKNOWN") -> Any:
    """Return the plugin as a network holds it: a clone of the registry creator's plugin for the parser."""
    creator = trt.get_plugin_registry().get_creator(name, "1", namespace)
    assert creator is not None, f"{namespace}::{name} is not registered"
    fields = trt.PluginFieldCollection([])
    preference = trt.QuickPluginCreationRequest.__members__[request]
    return creator.create_plugin(name, namespace, fields, trt.TensorRTPhase.BUILD, preference).clone()


def trace(plugin: Any, inputs: list[tuple[Any, tuple[int | str, ...]]]) -> Answers:
    """Call ``plugin`` as the builder does, in its order, for inputs of (dtype, shape). Strings are symbols."""
    answers, builder = Answers(), ExpressionBuilder()
    types, shapes = [kind for kind, _ in inputs], [shape for _, shape in inputs]
    symbols = [[Expression.of(dim) for dim in shape] for shape in shapes]
    with _readable():
        answers.output_types = list(plugin.get_output_data_types(types, [len(shape) for shape in shapes]))
        answers.output_shapes = [list(shape) for shape in plugin.get_output_shapes(symbols, [], builder)]
        ends = [(-1,) * len(shape) for shape in answers.output_shapes]
        described = [_described(*each) for each in [*inputs, *zip(answers.output_types, ends, strict=True)]]
        answers.formats = list(plugin.get_supported_format_combinations(described, len(inputs)))
        plugin.configure_plugin(described[: len(inputs)], described[len(inputs) :])
        plugin.set_tactic(0)
        answers.launch, answers.scalars = _Recorder(), _Recorder()
        plugin.get_launch_params(symbols, described, len(inputs), answers.launch, answers.scalars, builder)
    descriptions = [each.desc for each in described]
    answers.kernel, answers.code = plugin.get_kernel(descriptions[: len(inputs)], descriptions[len(inputs) :])
    return answers


@contextmanager
def _readable() -> Any:
    with patch.object(trt, "DimsExprs", _ReadableDims), patch.object(_tensor, "SymExprImpl", _ReadableScalar):
        yield


def _described(kind: Any, shape: tuple[int | str, ...]) -> Any:
    dynamic = trt.DynamicPluginTensorDesc()
    desc = trt.PluginTensorDesc()
    desc.type, desc.format = kind, trt.TensorFormat.LINEAR
    desc.dims = trt.Dims([dim if isinstance(dim, int) else -1 for dim in shape])
    dynamic.desc = desc
    return dynamic
