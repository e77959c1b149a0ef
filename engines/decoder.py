"""A decoder as data: pieces that a library runs, operators between them, and the values they pass on.

``export/passes/cut.py`` writes one, ``runtime/backends/executor.py`` runs one; neither knows what the steps compute.
"""

from collections import Counter
from collections.abc import Iterator

from tandemrt.engines.binding import Binding
from tandemrt.engines.contract import Contract
from tandemrt.engines.errors import quoted
from tandemrt.engines.operators import SCHEMAS, Schema
from tandemrt.engines.validation import Record, RelativePath, nearest, refuse


class Piece(Record):
    """A graph in a file, which reads and makes values by these names."""

    file: RelativePath
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Operator(Record):
    """An operator of the project, one of SCHEMAS. Values in the schema's order; an optional one left out is None."""

    name: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, int | float]

    @property
    def definition(self) -> Schema:
        return SCHEMAS[self.name]

    def named_inputs(self) -> dict[str, str]:
        """Value by input name of the schema; what is left out is not there."""
        names = (binding.name for binding in self.definition.inputs)
        return {name: value for name, value in zip(names, self.inputs, strict=False) if value is not None}

    def named_outputs(self) -> dict[str, str]:
        """Value by output name of the schema."""
        return dict(zip((binding.name for binding in self.definition.outputs), self.outputs, strict=False))

    def in_place(self) -> dict[str, str]:
        """Outputs that have the memory of an input: value by value."""
        inputs, outputs = self.named_inputs(), self.named_outputs()
        return {outputs[output]: inputs[source] for output, source in self.definition.in_place.items()}


Step = Piece | Operator


class Decoder(Record):
    """What an engine runs when it is not one file.

    ``constants``, a piece without inputs, runs once, when the decoder is opened; ``steps`` run in order in every call.
    ``values`` are all that is passed on and that the engine's contract does not name, with shapes in its symbols.
    """

    constants: Piece | None
    steps: tuple[Step, ...]
    values: tuple[Binding, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The constants, if there are any, and the pieces in order."""
        pieces = tuple(step for step in self.steps if isinstance(step, Piece))
        return pieces if self.constants is None else (self.constants, *pieces)

    @property
    def operators(self) -> tuple[Operator, ...]:
        return tuple(step for step in self.steps if isinstance(step, Operator))

    def bindings(self, contract: Contract) -> dict[str, Binding]:
        """Every value that a step reads or makes, by name."""
        return {binding.name: binding for binding in (*contract.inputs, *contract.outputs, *self.values)}

    def contract_of(self, piece: Piece, contract: Contract) -> Contract:
        """The bindings that the file of ``piece`` must have, in a decoder whose own are ``contract``."""
        known = self.bindings(contract)
        return Contract(tuple(known[name] for name in piece.inputs), tuple(known[name] for name in piece.outputs))

    def check(self, contract: Contract) -> None:
        """Raise a validator's error unless the steps can run in order and make what ``contract`` promises."""
        declared = Counter(b.name for b in (*contract.inputs, *contract.outputs, *self.values))
        if twice := [name for name, count in declared.items() if count > 1]:
            raise refuse(
                f"decoder.values must name every value once, and none of the contract's; got {quoted(twice[0])}"
            )
        constants = self.constants.outputs if self.constants else ()
        if self.constants and self.constants.inputs:
            raise refuse(f"decoder.constants must have no inputs; got {quoted(self.constants.inputs[0])}")
        made = {binding.name for binding in contract.inputs}
        there = set(made)
        for place, step in _numbered(self):
            if isinstance(step, Operator):
                _check_operator(place, step)
            for name in step.inputs:
                if name is not None and name not in there:
                    raise refuse(f"{place}.inputs must be there before they are read; got {quoted(name)}")
            for name in step.outputs:
                if name not in declared:
                    raise refuse(f"{place}.outputs must be among values or the contract's outputs; got {quoted(name)}")
                if name in made:
                    raise refuse(f"{place}.outputs must be made once; got {quoted(name)}")
                made.add(name)
            if isinstance(step, Operator):
                sources = set(step.in_place().values())
                if fixed := sources & set(constants):
                    raise refuse(f"{place} must not change constants in place; got {quoted(min(fixed))}")
                there -= sources  # what it held is gone
            there |= set(step.outputs)
        _check_outputs(self, contract, made)


def _numbered(decoder: Decoder) -> Iterator[tuple[str, Step]]:
    if decoder.constants is not None:
        yield "decoder.constants", decoder.constants
    for index, step in enumerate(decoder.steps):
        yield f"decoder.steps.{index}", step


def _check_operator(place: str, step: Operator) -> None:
    if step.name not in SCHEMAS:
        raise refuse(f"{place}.name must be an operator{nearest(step.name, list(SCHEMAS))}; got {quoted(step.name)}")
    schema = step.definition
    for kind, given, bindings in (("inputs", step.inputs, schema.inputs), ("outputs", step.outputs, schema.outputs)):
        wanted = [binding.name for binding in bindings]
        missing = [n for n, value in zip(wanted, (*given, *[None] * len(wanted)), strict=False) if value is None]
        if len(given) > len(wanted) or not set(missing) <= set(schema.optional):
            raise refuse(f"{place}.{kind} must be {schema.name}'s {', '.join(wanted)}; got {quoted(list(given))}")
    kinds = {name: type(value).__name__ for name, value in step.attributes.items()}
    if kinds != schema.attributes:
        wanted_kinds = ", ".join(f"{name} ({kind})" for name, kind in schema.attributes.items()) or "none"
        raise refuse(f"{place}.attributes must be {schema.name}'s {wanted_kinds}; got {quoted(step.attributes)}")


def _check_outputs(decoder: Decoder, contract: Contract, made: set[str]) -> None:
    if missing := [binding.name for binding in contract.outputs if binding.name not in made]:
        raise refuse(f"decoder.steps must make every output of the contract; {quoted(missing[0])} is not made")
    if missing := [value.name for value in decoder.values if value.name not in made]:
        raise refuse(f"decoder.steps must make every value; {quoted(missing[0])} is not made")
    homes: dict[str, str] = {}  # what several steps change, one behind the other, has one home
    for step in decoder.operators:
        for output, source in step.in_place().items():
            homes[output] = homes.pop(source, source)
    in_place = set(homes.items())
    promised = set(contract.aliases)
    given = {binding.name for binding in (*contract.inputs, *contract.outputs)}
    wrong = {pair for pair in in_place if given & set(pair)} ^ promised
    if wrong:
        output, source = min(wrong)
        rule = "decoder.steps must change in place what the contract says and nothing else"
        raise refuse(f"{rule}; got {quoted(output)} of {quoted(source)}")
