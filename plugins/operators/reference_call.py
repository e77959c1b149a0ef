"""Run an operator without an ONNX function on a CPU: its reference, for tests of decoders that a GPU runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.plugins.operators.launch import Context, Tensors


@dataclass(frozen=True)
class ReferenceCall:
    """A reference with bound tensors."""

    reference: Callable[..., Any]
    inputs: Tensors
    outputs: Tensors
    attributes: Mapping[str, Any]

    def run(self) -> None:
        """Run once."""
        results = self.reference(**{name: np.asarray(each) for name, each in self.inputs.items()}, **self.attributes)
        for name, result in zip(self.outputs, results, strict=True):
            np.copyto(self.outputs[name].numpy(), result)


def launch(
    operator: str,
    reference: Callable[..., Any],
    tensors: Tensors,
    attributes: Mapping[str, Any],
    context: Context,  # noqa: ARG001
) -> ReferenceCall:
    """Bind ``operator``, whose definition is ``reference``; see Launcher in plugins/operators/launch.py."""
    schema = SCHEMAS[operator]
    inputs = {binding.name: tensors[binding.name] for binding in schema.inputs}
    outputs = {each.name: tensors[schema.in_place.get(each.name, each.name)] for each in schema.outputs}
    return ReferenceCall(reference, inputs, outputs, attributes)
