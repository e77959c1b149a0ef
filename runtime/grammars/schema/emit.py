"""Writes shapes down as the schema that a grammar is compiled from: types, literals, objects, arrays, references."""

import math
from fractions import Fraction
from typing import Any

from tandemrt.engines.errors import BadRequest
from tandemrt.engines.validation import MOST_LINES
from tandemrt.runtime.grammars import patterns
from tandemrt.runtime.grammars.schema.dialect import Schema
from tandemrt.runtime.grammars.schema.document import Document, Unheld
from tandemrt.runtime.grammars.schema.expand import Expander
from tandemrt.runtime.grammars.schema.shapes import (
    ANYTHING,
    Array,
    Conj,
    Literals,
    Number,
    Object,
    Plain,
    Same,
    Shape,
    String,
)  # fmt: skip

MOST_PLACES = 20_000
_DEEPEST = 12  # levels that are written in one piece
_DOUBLE = 2**53  # integers up to here are doubles


def enforceable(schema: Schema, *, closed: bool = True, quick: bool = False) -> dict[str, Any]:
    """The schema that a grammar is compiled from, which takes nothing that ``schema`` does not.

    ``closed``: objects that are described have no other names unless ``additionalProperties`` says so.

    Raises:
        BadRequest: no JSON schema, what cannot be held with a line for each place, or no finite text fits.
        NotQuick: with ``quick``, there is more to work out than is always quick.
    """
    return _Writer(Expander(Document(schema), closed=closed, quick=quick)).write()


def loosened(schema: Schema, *, closed: bool = True, quick: bool = False) -> dict[str, Any]:
    """A schema for a text that is checked when it is finished: what cannot be held is left open.

    Raises:
        BadRequest: no JSON schema, or no finite text fits.
        NotQuick: as ``enforceable``.
    """
    try:
        return enforceable(schema, closed=closed, quick=quick)
    except BadRequest:
        return _Writer(Expander(Document(schema), closed=closed, loose=True, quick=quick)).write()


class _Writer:
    def __init__(self, expander: Expander) -> None:
        self._expander = expander
        self._shapes: dict[Conj, list[Shape]] = {}
        self._problems: dict[str, None] = {}
        self._open: set[Conj] = {ANYTHING}  # places that take anything

    def write(self) -> dict[str, Any]:
        root = self._found(Conj(self._expander.document.root))
        self._explore(root)
        if self._problems and not self._expander.loose:
            _refuse(list(self._problems))
        if root in self._open:
            return {}
        self._drop_endless()
        self._check_circles()
        if not self._shapes[root]:
            _refuse(["#: no finite text fits the schema; look for contradictions and for references without an end"])
        self._uses = dict.fromkeys(self._shapes, 0)
        self._uses[root] = 1
        for shapes in self._shapes.values():
            for shape in shapes:
                for child in _children(shape):
                    if self._found(child) in self._uses:
                        self._uses[self._found(child)] += 1
        self._names: dict[Conj, str] = {}
        self._pending: list[Conj] = []
        written = self._union(root, 0)
        definitions: dict[str, Any] = {}
        while self._pending:
            conj = self._pending.pop()
            definitions[self._names[conj]] = self._union(conj, 0)
        return {**written, "$defs": definitions} if definitions else written

    def _found(self, conj: Conj) -> Conj:
        try:
            return self._expander.conj(conj)
        except Unheld as problem:
            self._problems.setdefault(str(problem))
            return ANYTHING

    def _explore(self, root: Conj) -> None:
        pending = [root]
        while pending:
            conj = pending.pop()
            if conj in self._shapes:
                continue
            try:
                if len(self._shapes) > MOST_PLACES:
                    raise Unheld("#", f"more than {MOST_PLACES} combinations of schemas; simplify it")
                shapes = self._expander.shapes(conj) if conj.nodes else []
            except Unheld as problem:
                self._problems.setdefault(str(problem))
                self._open.add(conj)
                shapes = []
            except RecursionError:
                self._problems.setdefault("#: schemas that hold together nest too deep; flatten them")
                self._open.add(conj)
                shapes = []
            self._shapes[conj] = shapes
            if len(self._shapes) > MOST_PLACES + 1:
                return
            for shape in shapes:
                pending += [self._found(child) for child in reversed(_children(shape))]

    def _drop_endless(self) -> None:
        """Keep the shapes of which a finite text exists."""
        ending = set(self._open)
        grown = True
        while grown:
            grown = False
            for conj, shapes in self._shapes.items():
                if conj not in ending and any(self._ends(shape, ending) for shape in shapes):
                    ending.add(conj)
                    grown = True
        for conj, shapes in self._shapes.items():
            self._shapes[conj] = [shape for shape in shapes if self._ends(shape, ending)]

    def _ends(self, shape: Shape, ending: set[Conj]) -> bool:
        if isinstance(shape, Same):
            return self._found(shape.conj) in ending
        if isinstance(shape, Object):
            return all(self._found(shape.properties[name]) in ending for name in shape.required)
        if isinstance(shape, Array):
            needed = shape.first[: shape.least]
            more = [shape.rest] if shape.least > len(shape.first) else []
            return all(child is not None and self._found(child) in ending for child in [*needed, *more])
        return True

    def _check_circles(self) -> None:
        """Refuse choices that lead back to themselves without a character in between."""
        done: set[Conj] = set()
        for start in self._shapes:
            path: list[tuple[Conj, list[Conj]]] = [(start, self._same(start))] if start not in done else []
            active = {start}
            while path:
                conj, left = path[-1]
                if not left:
                    path.pop()
                    active.discard(conj)
                    done.add(conj)
                    continue
                following = left.pop()
                if following in active:
                    _refuse([f"{following.nodes[0].place}: only refers to itself; point the reference to a schema"])
                if following not in done:
                    active.add(following)
                    path.append((following, self._same(following)))

    def _same(self, conj: Conj) -> list[Conj]:
        return [self._found(shape.conj) for shape in self._shapes[conj] if isinstance(shape, Same)]

    def _schema(self, conj: Conj | None, depth: int) -> Any:
        """The schema of a place, or a reference to where it is written once for all."""
        if conj is None:
            return False
        conj = self._found(conj)
        if conj in self._open:
            return {}
        shapes = self._shapes[conj]
        if not shapes:
            return False
        small = all(isinstance(shape, Plain | Number | String) or _is_short(shape) for shape in shapes)
        if small or (self._uses[conj] == 1 and depth < _DEEPEST):
            return self._union(conj, depth + 1)
        if conj not in self._names:
            self._names[conj] = str(len(self._names))
            self._pending.append(conj)
        return {"$ref": f"#/$defs/{self._names[conj]}"}

    def _union(self, conj: Conj, depth: int) -> dict[str, Any]:
        written = [self._shape(shape, depth) for shape in self._shapes[conj]]
        unlike: list[Any] = []
        for one in written:
            if one not in unlike:
                unlike.append(one)
        return unlike[0] if len(unlike) == 1 else {"anyOf": unlike}

    def _shape(self, shape: Shape, depth: int) -> Any:
        if isinstance(shape, Literals):
            return {"enum": shape.values}
        if isinstance(shape, Plain):
            return {"type": shape.kind}
        if isinstance(shape, Number):
            return _number(shape)
        if isinstance(shape, String):
            return _string(shape)
        if isinstance(shape, Same):
            return self._schema(shape.conj, depth)
        if isinstance(shape, Array):
            written: dict[str, Any] = {"type": "array"}
            if shape.first:
                written["prefixItems"] = [self._schema(item, depth) for item in shape.first]
            written["items"] = self._schema(shape.rest, depth)
            return written | _limits(shape, "minItems", "maxItems")
        return self._object(shape, depth)

    def _object(self, shape: Object, depth: int) -> dict[str, Any]:
        properties = {name: self._schema(asked, depth) for name, asked in shape.properties.items()}
        named = {f"^{pattern}$": self._schema(asked, depth) for pattern, asked in shape.patterns.items()}
        rest = self._schema(shape.rest, depth)
        if rest is not False and properties:
            # Beside properties the engine would let one in again under an escaped spelling of its name.
            named, rest = {f"^{patterns.other_than(list(properties))}$": rest}, False
        written: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": rest}
        if shape.required:
            written["required"] = shape.required
        if named:
            written["patternProperties"] = named
        return written | _limits(shape, "minProperties", "maxProperties")


def _number(shape: Number) -> dict[str, Any]:
    written: dict[str, Any] = {"type": "integer" if shape.integer else "number"}
    for keyword, bound, up in (
        ("minimum", shape.low, True),
        ("exclusiveMinimum", shape.above, True),
        ("maximum", shape.high, False),
        ("exclusiveMaximum", shape.below, False),
    ):
        if bound is not None:
            written[keyword] = _double(bound, up)
    if shape.multiples:
        written["multipleOf"] = _decimal(shape.multiples[0])
    if len(shape.multiples) > 1:
        written["allOf"] = [{"type": "number", "multipleOf": _decimal(step)} for step in shape.multiples[1:]]
    return written


def _string(shape: String) -> dict[str, Any]:
    written: dict[str, Any] = {"type": "string"} | _limits(shape, "minLength", "maxLength")
    if shape.patterns:
        written["pattern"] = f"^{shape.patterns[0]}$"
    if len(shape.patterns) > 1:
        written["allOf"] = [{"type": "string", "pattern": f"^{pattern}$"} for pattern in shape.patterns[1:]]
    return written


def _limits(shape: Array | Object | String, least: str, most: str) -> dict[str, int]:
    return ({least: shape.least} if shape.least else {}) | ({} if shape.most is None else {most: shape.most})


def _double(bound: Fraction, up: bool) -> int | float:
    """A bound as the engine reads it: the nearest double that lets in no more."""
    if bound.denominator == 1 and abs(bound) <= _DOUBLE:
        return int(bound)
    number = float(bound)
    if Fraction(number) != bound and (Fraction(number) < bound) == up and Fraction(repr(number)) != bound:
        number = math.nextafter(number, math.inf if up else -math.inf)
    return int(number) if number.is_integer() else number


def _decimal(step: Fraction) -> int | float:
    return int(step) if step.denominator == 1 else float(step)


def _is_short(shape: Shape) -> bool:
    return (
        isinstance(shape, Literals)
        and len(shape.values) <= 8
        and not any(isinstance(v, list | dict) for v in shape.values)
    )


def _children(shape: Shape) -> list[Conj]:
    if isinstance(shape, Same):
        return [shape.conj]
    if isinstance(shape, Array):
        return [*shape.first, *([shape.rest] if shape.rest is not None else [])]
    if isinstance(shape, Object):
        rest = [shape.rest] if shape.rest is not None else []
        return [*shape.properties.values(), *shape.patterns.values(), *rest]
    return []


def _refuse(problems: list[str]) -> None:
    lines = [f"- {problem}" for problem in problems[:MOST_LINES]]
    if len(problems) > MOST_LINES:
        lines.append(f"- and {len(problems) - MOST_LINES} more")
    raise BadRequest(
        "structured_outputs.json: the grammar cannot enforce\n"
        + "\n".join(lines)
        + "\nChange the schema, or set validate_output=True to have the finished text checked instead"
    )
