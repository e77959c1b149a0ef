"""Run any operator on a CPU: its ONNX function in an onnxruntime session, with tensors bound in place."""

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from tandemrt.engines.contract.dtypes import ONNX
from tandemrt.engines.contract.operators import SCHEMAS, Schema, T
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.engines.validation.extras import pip_install
from tandemrt.plugins.functions.body import OPSET
from tandemrt.plugins.onnxruntime.custom_operators import ON_CPUS, OPERATORS, load
from tandemrt.plugins.onnxruntime.sessions import dtype_name, place, session_options
from tandemrt.plugins.operators.constants import DOMAIN
from tandemrt.plugins.operators.launch import Context, FunctionBuilder, Tensors
from tandemrt.plugins.tensors import torch

_IR_VERSION = 11


class FunctionCall:
    """An onnxruntime session with bound tensors."""

    def __init__(self, session: Any, binding: Any, keep: tuple[torch.Tensor, ...]) -> None:
        self._session = session
        self._binding = binding
        self._keep = keep  # the binding holds addresses only

    def run(self) -> None:
        """Run once."""
        self._session.run_with_iobinding(self._binding)


def launch(
    operator: str, function: FunctionBuilder, tensors: Tensors, attributes: Mapping[str, Any], context: Context
) -> FunctionCall:
    """Bind ``operator``, whose ONNX function ``function`` builds; see Launcher in plugins/operators/launch.py.

    Calls with the same dtypes, ranks and attributes share a session. Raises BackendUnavailable without onnxruntime.
    """
    schema = SCHEMAS[operator]
    attribute_items = tuple((name, attributes[name]) for name in schema.attributes)
    kinds = tuple((name, dtype_name(tensor), tensor.dim()) for name, tensor in sorted(tensors.items()))
    session = context.get_or_create(
        (operator, attribute_items, kinds),
        lambda: _open(schema, function, tensors, dict(attribute_items), context.threads),
    )
    binding = session.io_binding()
    for input_binding in schema.inputs:
        if input_binding.name in tensors:
            binding.bind_input(input_binding.name, *place(tensors[input_binding.name]))
    for output_binding in schema.outputs:
        tensor = tensors.get(schema.in_place.get(output_binding.name, output_binding.name))
        if tensor is not None:
            binding.bind_output(output_binding.name, *place(tensor))
    return FunctionCall(session, binding, tuple(tensors.values()))


def _open(
    schema: Schema, function: FunctionBuilder, tensors: Tensors, attributes: Mapping[str, Any], threads: int | None
) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendUnavailable(
            f"operator {schema.name}: needs onnxruntime to run on a CPU: {pip_install('cpu')}"
        ) from error
    model = ir.to_proto(_model(schema, function, tensors, attributes)).SerializeToString()
    options = session_options(threads=threads)
    if schema.name in ON_CPUS or (schema.name in OPERATORS and _dtype(schema, tensors) == "float32"):
        load(options)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _model(schema: Schema, function: FunctionBuilder, tensors: Tensors, attributes: Mapping[str, Any]) -> ir.Model:
    """Return a graph of one node, with its function and dynamic shapes."""
    tensors_of_outputs = {output.name: schema.in_place.get(output.name, output.name) for output in schema.outputs}
    values = {
        name: ir.val(name, dtype=ir.DataType(ONNX[dtype_name(tensors[source])]), shape=[None] * tensors[source].dim())
        for name, source in {**{binding.name: binding.name for binding in schema.inputs}, **tensors_of_outputs}.items()
        if source in tensors
    }
    functions = function(_dtype(schema, tensors), tuple(tensors))
    [called] = [each for each in functions if each.name == schema.name]
    inputs = [values.get(str(parameter.name)) for parameter in called.inputs]  # optional inputs may not be among them
    while inputs[-1] is None:
        inputs.pop()
    outputs = [values[b.name] for b in schema.outputs if b.name in values]
    node = ir.node(schema.name, inputs, dict(attributes), domain=DOMAIN, outputs=outputs)
    imports = {"": OPSET, DOMAIN: 1}
    taken = [value for value in inputs if value is not None]
    graph = ir.Graph(taken, outputs, nodes=[node], name=schema.name, opset_imports=imports)
    return ir.Model(graph, ir_version=_IR_VERSION, functions=functions)


def _dtype(schema: Schema, tensors: Tensors) -> str:
    """Return the dtype that the operator's tensors share; float32 if its schema fixes all dtypes."""
    bindings = (*schema.inputs, *schema.outputs)
    return next((dtype_name(tensors[b.name]) for b in bindings if b.dtype == T and b.name in tensors), "float32")
