"""Experts with weights of 4 or 8 bits on a GPU, by the project's operators."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from tandemrt.engines.recipe.backends import CPU
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.graph.builder import GraphBuilder, dims_of, width_of, without_trailing_none
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.low_bit_matmul import OVERLOADS
from tandemrt.plugins.operators.constants import DOMAIN, LOW_BIT_EXPERTS_MULTIPLE

Forms = tuple[LowBitFormat, LowBitFormat]  # of gates and ups, and of downs


def low_bit_forms(w: Weights, gate_up: Sequence[str], down: Sequence[str]) -> Forms | None:
    """Return how a build stored the weights of all experts of a layer; None: unquantized.

    Raises BadCheckpoint, by name, unless all are stored alike.
    """
    forms = [_form(w, names) for names in (gate_up, down)]
    one, other = forms
    if one is None and other is None:
        return None
    if one is None or other is None or (one.numbers, one.zeros) != (other.numbers, other.zeros):
        raise _unequal(gate_up[0], down[0])
    return one, other


def low_bit_experts(
    b: GraphBuilder,
    x: ir.Value,
    logits: ir.Value,
    w: Weights,
    gate_up: Sequence[str],
    down: Sequence[str],
    forms: Forms,
    width: int,
    more: Sequence[ir.Value | None],
    attributes: Mapping[str, Any],
) -> ir.Value:
    """Append the operator for ``x`` [..., hidden] and weights of ``forms``; ``width`` is that of an expert.

    ``more``: the inputs of the operator after those of the weights, ``attributes``: those of every format.

    Raises BadCheckpoint for sizes that the kernels do not support.
    """
    hidden = width_of(x)
    if hidden % LOW_BIT_EXPERTS_MULTIPLE or width % LOW_BIT_EXPERTS_MULTIPLE:
        raise BadCheckpoint(
            f"{gate_up[0]}: experts in {forms[0].bits} bits on a GPU need a hidden size and a width in multiples of "
            f"{LOW_BIT_EXPERTS_MULTIPLE}; they have {hidden} and {width}; build them with dequantize = true"
        )
    prefix = gate_up[0].rpartition(".0.")[0]
    rows = 2 * width * len(down) // len(gate_up)  # of a gate, an up or both in one
    both = w.low_bit_tensors(gate_up, [rows] * len(gate_up), hidden, forms[0], name=f"{prefix}.gate_up")
    last = w.low_bit_tensors(down, [hidden] * len(down), width, forms[1], name=f"{prefix}.down")
    weights = [each for kind in zip(both, last, strict=True) for each in kind]
    if forms[0].numbers == "int4" and not forms[0].zeros:
        weights += [None, None]
    (mixed,) = b.custom(
        f"{forms[0].numbers}_experts",
        *without_trailing_none([x, logits, *weights, *more]),
        domain=DOMAIN,
        outputs=[(w.dtype, dims_of(x))],
        **attributes,
        gate_up_group=forms[0].group_size,
        down_group=forms[1].group_size,
    )
    b.nodes[-1].overload = OVERLOADS[forms[0].zeros]
    return mixed


def _form(w: Weights, names: Sequence[str]) -> LowBitFormat | None:
    formats = [w.low_bit_format(name) for name in names]
    quantized = next((n for n in names if w.low_bit_format(n) is None and w.scheme(n.removesuffix(".weight"))), None)
    if quantized is not None:
        raise BadCheckpoint(
            f"{quantized}: experts in float8 next to weights of 4 or 8 bits have no operators on a GPU; choose "
            f"backend.name {CPU!r} or dequantize = true"
        )
    for name, form in zip(names, formats, strict=True):
        if form != formats[0]:
            raise _unequal(names[0], name)
    return formats[0]


def _unequal(one: str, other: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"{one}: the experts of a layer must be quantized alike for a GPU, {other} is not; choose backend.name "
        f"{CPU!r} or dequantize = true"
    )
