"""Bindings of TensorRT's engines: names of dtypes, and int64 in releases that have none."""

from collections.abc import Mapping
from dataclasses import replace

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract

DATA_TYPES: Mapping[str, str] = {  # members of tensorrt.DataType
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int64": "INT64",
    "int32": "INT32",
    "bool": "BOOL",
    "uint8": "UINT8",
}
_DTYPES = {member: dtype for dtype, member in DATA_TYPES.items()}


def dtype_of(member: str) -> str:
    """Return the name of a member of TensorRT's DataType such as ``HALF``; an unknown one is returned unchanged."""
    return _DTYPES.get(member, member)


def narrow_inputs(engine: Contract, contract: Contract) -> tuple[str, ...]:
    """Return the int64 inputs of ``contract`` that ``engine`` reads as int32: TensorRT before 10 has no int64."""
    pairs = paired(engine, contract)
    wide = {binding.name for binding in contract.inputs if binding.dtype == "int64" and binding.name not in pairs}
    return tuple(binding.name for binding in engine.inputs if binding.name in wide and binding.dtype == "int32")


def paired(engine: Contract, contract: Contract) -> tuple[str, ...]:
    """Return the int64 bindings of ``contract`` that ``engine`` has as pairs of int32, the same bytes.

    Plugins for TensorRT before 10 take them: they need all 64 bits.
    """
    ranks = {b.name: len(b.shape) for b in (*contract.inputs, *contract.outputs) if b.dtype == "int64"}
    bindings = (*engine.inputs, *engine.outputs)
    return tuple(b.name for b in bindings if b.dtype == "int32" and ranks.get(b.name) == len(b.shape) - 1)


def widened(engine: Contract, contract: Contract) -> Contract:
    """Return the bindings of ``engine`` with its narrow inputs and its pairs as in ``contract``."""
    narrow, pairs = narrow_inputs(engine, contract), paired(engine, contract)

    def wide(binding: Binding) -> Binding:
        if binding.name in pairs:
            return replace(binding, dtype="int64", shape=binding.shape[:-1])
        return replace(binding, dtype="int64") if binding.name in narrow else binding

    inputs, outputs = (tuple(map(wide, side)) for side in (engine.inputs, engine.outputs))
    return replace(engine, inputs=inputs, outputs=outputs)
