"""The engines without weights: adjust (penalties), verify (a draft window) and propose (one drafted token).

Each is one or two nodes of the ``tandemrt`` domain. The model file carries their function bodies.
"""

import onnx_ir as ir

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.export.graph.builder import DTYPES, IR_VERSION
from tandemrt.plugins.functions import (
    OPSET,
    accept_coin,
    adjust_logits,
    filter_logits,
    position_noise,
    sample_draft,
    token_bitmask,
    token_noise,
    verify_draft,
)
from tandemrt.plugins.operators.constants import DOMAIN


def build_verify(*, vocab: int, dtype: str, draft_probs: bool) -> ir.Model:
    """Return the model of ``contract.verify``: mask, filter, sample and accept in one graph.

    ``dtype`` is the dtype of the target's logits. The computation is in float32 and float64.
    """
    bindings = contract.verify(vocab=vocab, dtype=dtype, draft_probs=draft_probs)
    values = {binding.name: _declare(binding) for binding in (*bindings.inputs, *bindings.outputs)}
    masked = _call("token_bitmask", [values["logits"], values["bitmask"]])
    name = "verify_draft_probs" if draft_probs else "verify_draft"
    inputs = [masked.outputs[0], *(values[binding.name] for binding in SCHEMAS[name].inputs[1:])]
    verified = _call(name, inputs, outputs=[values["tokens"], values["count"]])
    functions = (token_bitmask(), position_noise(), accept_coin(), filter_logits(), verify_draft(draft_probs))
    return _model("verify", bindings, values, [masked, verified], functions)


def build_propose(*, vocab: int, dtype: str, draft_probs: bool, target_ids: bool = False) -> ir.Model:
    """Return the model of ``contract.propose``: one drafted token per row, and its distribution if ``draft_probs``."""
    bindings = contract.propose(vocab=vocab, dtype=dtype, draft_probs=draft_probs, target_ids=target_ids)
    values = {binding.name: _declare(binding) for binding in (*bindings.inputs, *bindings.outputs)}
    inputs = [values[binding.name] for binding in bindings.inputs]
    outputs = [values[binding.name] for binding in bindings.outputs]
    drawn = _call("sample_draft", inputs, outputs=outputs)
    noise = token_noise() if target_ids else position_noise()
    functions = (noise, filter_logits(), sample_draft(draft_probs, target_ids))
    return _model("propose", bindings, values, [drawn], functions)


def build_adjust(*, vocab: int, dtype: str) -> ir.Model:
    """Return the model of ``contract.adjust``: bias and penalties, in place on the logits."""
    bindings = contract.adjust(vocab=vocab, dtype=dtype)
    values = {binding.name: _declare(binding) for binding in (*bindings.inputs, *bindings.outputs)}
    inputs = [values[binding.name] for binding in bindings.inputs]
    return _model(
        "adjust",
        bindings,
        values,
        [_call("adjust_logits", inputs, outputs=[values["adjusted"]])],
        (adjust_logits(dtype),),
    )


def _call(operator: str, inputs: list[ir.Value], **outputs: list[ir.Value]) -> ir.Node:
    # TensorRT's parser prefers the function body to a plugin unless the node names the plugin's namespace.
    return ir.node(operator, inputs, {"plugin_namespace": DOMAIN}, domain=DOMAIN, **outputs)


def _declare(binding: Binding) -> ir.Value:
    return ir.val(binding.name, dtype=DTYPES[binding.dtype], shape=binding.shape)


def _model(
    name: str,
    bindings: Contract,
    values: dict[str, ir.Value],
    nodes: list[ir.Node],
    functions: tuple[ir.Function, ...],
) -> ir.Model:
    inputs = [values[binding.name] for binding in bindings.inputs]
    outputs = [values[binding.name] for binding in bindings.outputs]
    graph = ir.Graph(inputs, outputs, nodes=nodes, name=name, opset_imports={"": OPSET, DOMAIN: 1})
    return ir.Model(graph, ir_version=IR_VERSION, functions=functions)
