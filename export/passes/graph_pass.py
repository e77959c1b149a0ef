"""The contract of graph passes, and pipelines that run them in order.

The shape follows onnx/ir-py (https://github.com/onnx/ir-py/blob/main/src/onnx_ir/passes/_pass_infra.py): a pass has a
check before, a rewrite in place, and a check after. It returns the number of rewrites, so that a test can detect a
pass that stopped matching.
"""

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.engines.validation.errors import InternalError

Condition = Callable[[ir.Model], str | None]  # returns the violation of the condition, or None


@dataclass(frozen=True)
class GraphPass:
    """A rewrite of a graph in place, with the conditions that it requires before and ensures after.

    ``rewrite`` returns the number of rewrites. No pass changes the names, dtypes or shapes of the graph's inputs and
    outputs. Raises InternalError, with the pass and the condition, if a condition does not hold.
    """

    name: str
    rewrite: Callable[[ir.Model], int]
    requires: tuple[Condition, ...] = ()
    ensures: tuple[Condition, ...] = ()

    def __call__(self, model: ir.Model) -> int:
        """Run the pass on ``model`` and return the number of rewrites."""
        self._check(model, self.requires, "requires")
        before = _bindings(model)
        count = self.rewrite(model)
        self._check(model, self.ensures, "ensures")
        if _bindings(model) != before:
            raise InternalError(f"pass {self.name} must not change the inputs or outputs of {model.graph.name}")
        return count

    def _check(self, model: ir.Model, conditions: tuple[Condition, ...], when: str) -> None:
        for condition in conditions:
            if why := condition(model):
                raise InternalError(f"pass {self.name} {when} {condition.__name__} of {model.graph.name}: {why}")


def graph_pass(
    *, requires: tuple[Condition, ...] = (), ensures: tuple[Condition, ...]
) -> Callable[[Callable[[ir.Model], int]], GraphPass]:
    """Decorate a rewrite function as a pass of the same name."""

    def make(rewrite: Callable[[ir.Model], int]) -> GraphPass:
        return GraphPass(rewrite.__name__, rewrite, requires, ensures)

    return make


@dataclass(frozen=True)
class Pipeline:
    """Passes that run in order."""

    passes: tuple[GraphPass, ...] = ()

    def after(self, *first: GraphPass) -> "Pipeline":
        """Return the pipeline with the passes ``first`` at its beginning."""
        return Pipeline((*first, *self.passes))

    def __call__(self, model: ir.Model) -> dict[str, int]:
        """Run every pass on ``model`` in place and return the number of rewrites by pass."""
        return {each.name: each(model) for each in self.passes}


def nodes_in_order(model: ir.Model) -> str | None:
    """Every node follows the nodes whose values it reads."""
    available = {*model.graph.inputs, *model.graph.initializers.values()}
    for node in model.graph:
        if early := [value for value in node.inputs if value is not None and value not in available]:
            return f"{node.name} reads {early[0].name} before a node makes it"
        available |= set(node.outputs)
    return None


def values_typed(model: ir.Model) -> str | None:
    """Every value that a node makes has a dtype and a shape."""
    for node in model.graph:
        for value in node.outputs:
            if value.name and (value.dtype is None or value.shape is None):
                return f"{value.name} has no dtype or no shape"
    return None


def _bindings(model: ir.Model) -> list[tuple[str | None, ir.DataType | None, str]]:
    return [(value.name, value.dtype, str(value.shape)) for value in (*model.graph.inputs, *model.graph.outputs)]
