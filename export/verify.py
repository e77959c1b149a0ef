"""The two engines without weights: verification of a window, and the draw of one drafted token.

Both are a node or two of the ``tandemrt`` domain; the model file carries the functions behind them.
"""

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass

from tandemrt.engines import contract
from tandemrt.engines.contract import Binding, Contract
from tandemrt.plugins.functions import OPSET, library
from tandemrt.plugins.operators import DOMAIN

_IR_VERSION = 11
_DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "int32": ir.DataType.INT32,
    "int64": ir.DataType.INT64,
}
_REQUEST = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "rule")


def build_verify(*, vocab: int, dtype: str, draft_probs: bool) -> ir.Model:
    """Return the model of ``contract.verify``: mask, filter, draw and accept in one graph.

    ``dtype`` is that of the target's logits; they are cast to float32 inside.
    """
    bindings = contract.verify(vocab=vocab, dtype=dtype, draft_probs=draft_probs)
    values = {binding.name: _declare(binding) for binding in (*bindings.inputs, *bindings.outputs)}
    wide = ir.node("Cast", [values["logits"]], {"to": int(ir.DataType.FLOAT)})
    masked = ir.node("token_bitmask", [wide.outputs[0], values["bitmask"]], domain=DOMAIN)
    others = ("draft_tokens", "draft_len", *_REQUEST, *(("draft_probs",) if draft_probs else ()))
    inputs = [masked.outputs[0], *(values[name] for name in others)]
    verified = ir.node("verify_draft", inputs, domain=DOMAIN, outputs=[values["tokens"], values["count"]])
    return _model("verify", bindings, values, [wide, masked, verified], draft_probs)


def build_propose(*, vocab: int, dtype: str, draft_probs: bool) -> ir.Model:
    """Return the model of ``contract.propose``: one drafted token per row, and its law with ``draft_probs``."""
    bindings = contract.propose(vocab=vocab, dtype=dtype, draft_probs=draft_probs)
    values = {binding.name: _declare(binding) for binding in (*bindings.inputs, *bindings.outputs)}
    inputs = [values["logits"], *(values[name] for name in _REQUEST)]
    outputs = [values[binding.name] for binding in bindings.outputs]
    drawn = ir.node("sample_draft", inputs, domain=DOMAIN, outputs=outputs)
    return _model("propose", bindings, values, [drawn], draft_probs)


def _declare(binding: Binding) -> ir.Value:
    return ir.val(binding.name, dtype=_DTYPES[binding.dtype], shape=binding.shape)


def _model(
    name: str, bindings: Contract, values: dict[str, ir.Value], nodes: list[ir.Node], draft_probs: bool
) -> ir.Model:
    inputs = [values[binding.name] for binding in bindings.inputs]
    outputs = [values[binding.name] for binding in bindings.outputs]
    graph = ir.Graph(inputs, outputs, nodes=nodes, name=name, opset_imports={"": OPSET, DOMAIN: 1})
    model = ir.Model(graph, ir_version=_IR_VERSION, functions=library(draft_probs=draft_probs))
    RemoveUnusedFunctionsPass()(model)
    return model
