"""A decoder in steps: subgraphs that onnxruntime runs, operators between them, and the values that they pass on.

``export/passes/cut.py`` writes it and ``runtime/device/backends/onnxruntime/executor.py`` runs it. Neither depends on
what a step computes.
"""

from collections import Counter
from collections.abc import Iterator

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.operators import SCHEMAS, Schema
from tandemrt.engines.validation.errors import quoted
from tandemrt.engines.validation.records import Record, RelativePath, nearest, reject


class Subgraph(Record):
    """A graph in a file, with the names of the values that it reads and writes."""

    file: RelativePath
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Operator(Record):
    """An operator of SCHEMAS. Values are in the schema's order; an omitted optional one is None."""

    name: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, int | float]

    @property
    def definition(self) -> Schema:
        return SCHEMAS[self.name]

    def named_inputs(self) -> dict[str, str]:
        """Map the schema's input names to values, without omitted ones."""
        names = (binding.name for binding in self.definition.inputs)
        return {name: value for name, value in zip(names, self.inputs, strict=False) if value is not None}

    def named_outputs(self) -> dict[str, str]:
        """Map the schema's output names to values."""
        return dict(zip((binding.name for binding in self.definition.outputs), self.outputs, strict=False))

    def in_place(self) -> dict[str, str]:
        """Map each output value that shares an input's memory to that input value."""
        inputs, outputs = self.named_inputs(), self.named_outputs()
        return {outputs[output]: inputs[source] for output, source in self.definition.in_place.items()}


Step = Subgraph | Operator


class Decoder(Record):
    """An engine of several steps.

    ``constants``, a subgraph without inputs, runs once when the decoder opens; ``steps`` run in order in every call.
    ``values`` are the intermediate values that the engine's contract does not name, with shapes in its symbols.
    """

    constants: Subgraph | None
    steps: tuple[Step, ...]
    values: tuple[Binding, ...]

    @property
    def subgraphs(self) -> tuple[Subgraph, ...]:
        """The constants, if any, followed by the subgraphs in order."""
        subgraphs = tuple(step for step in self.steps if isinstance(step, Subgraph))
        return subgraphs if self.constants is None else (self.constants, *subgraphs)

    @property
    def operators(self) -> tuple[Operator, ...]:
        return tuple(step for step in self.steps if isinstance(step, Operator))

    def bindings(self, contract: Contract) -> dict[str, Binding]:
        """Return every value that a step reads or writes, by name."""
        return {binding.name: binding for binding in (*contract.inputs, *contract.outputs, *self.values)}

    def contract_of(self, subgraph: Subgraph, contract: Contract) -> Contract:
        """Return the bindings of the file of ``subgraph``, in a decoder with this ``contract``."""
        known = self.bindings(contract)
        return Contract(tuple(known[name] for name in subgraph.inputs), tuple(known[name] for name in subgraph.outputs))

    def check(self, contract: Contract) -> None:
        """Raise a validation error unless the steps can run in order and write every output of ``contract``."""
        declared = Counter(b.name for b in (*contract.inputs, *contract.outputs, *self.values))
        if twice := [name for name, count in declared.items() if count > 1]:
            raise reject(
                f"decoder.values must have distinct names that the contract does not have; got {quoted(twice[0])}"
            )
        constants = self.constants.outputs if self.constants else ()
        if self.constants and self.constants.inputs:
            raise reject(f"decoder.constants must have no inputs; got {quoted(self.constants.inputs[0])}")
        written = {binding.name for binding in contract.inputs}
        readable = set(written)
        for place, step in _numbered(self):
            if isinstance(step, Operator):
                _check_operator(place, step)
            for name in step.inputs:
                if name is not None and name not in readable:
                    raise reject(f"{place}.inputs must be written before they are read; got {quoted(name)}")
            for name in step.outputs:
                if name not in declared:
                    raise reject(f"{place}.outputs must be among values or the contract's outputs; got {quoted(name)}")
                if name in written:
                    raise reject(f"{place}.outputs must be written once; got {quoted(name)}")
                written.add(name)
            if isinstance(step, Operator):
                sources = set(step.in_place().values())
                if fixed := sources & set(constants):
                    raise reject(f"{place} must not update constants in place; got {quoted(min(fixed))}")
                readable -= sources  # overwritten
            readable |= set(step.outputs)
        _check_outputs(self, contract, written)


def _numbered(decoder: Decoder) -> Iterator[tuple[str, Step]]:
    if decoder.constants is not None:
        yield "decoder.constants", decoder.constants
    for index, step in enumerate(decoder.steps):
        yield f"decoder.steps.{index}", step


def _check_operator(place: str, step: Operator) -> None:
    if step.name not in SCHEMAS:
        raise reject(f"{place}.name must be an operator{nearest(step.name, list(SCHEMAS))}; got {quoted(step.name)}")
    schema = step.definition
    for kind, values, bindings in (("inputs", step.inputs, schema.inputs), ("outputs", step.outputs, schema.outputs)):
        wanted = [binding.name for binding in bindings]
        missing = [n for n, value in zip(wanted, (*values, *[None] * len(wanted)), strict=False) if value is None]
        if len(values) > len(wanted) or not set(missing) <= set(schema.optional):
            raise reject(f"{place}.{kind} must be {schema.name}'s {', '.join(wanted)}; got {quoted(list(values))}")
    kinds = {name: type(value).__name__ for name, value in step.attributes.items()}
    if kinds != schema.attributes:
        wanted_kinds = ", ".join(f"{name} ({kind})" for name, kind in schema.attributes.items()) or "none"
        raise reject(f"{place}.attributes must be {schema.name}'s {wanted_kinds}; got {quoted(step.attributes)}")


def _check_outputs(decoder: Decoder, contract: Contract, written: set[str]) -> None:
    if missing := [binding.name for binding in contract.outputs if binding.name not in written]:
        raise reject(f"decoder.steps must write every output of the contract; {quoted(missing[0])} is not written")
    if missing := [value.name for value in decoder.values if value.name not in written]:
        raise reject(f"decoder.steps must write every value; {quoted(missing[0])} is not written")
    memory: dict[str, str] = {}  # last output -> first input, for values that several steps update in turn
    for step in decoder.operators:
        for output, source in step.in_place().items():
            memory[output] = memory.pop(source, source)
    in_place = set(memory.items())
    required = set(contract.aliases)
    bound = {binding.name for binding in (*contract.inputs, *contract.outputs)}
    wrong = {pair for pair in in_place if bound & set(pair)} ^ required
    if wrong:
        output, source = min(wrong)
        rule = "decoder.steps must update in place exactly the contract's aliases"
        raise reject(f"{rule}; got {quoted(output)} for {quoted(source)}")
