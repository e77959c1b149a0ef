"""Write shapes (shapes.py) as a JSON schema of few keywords, for json_grammar.py."""

import math
from fractions import Fraction
from typing import Any

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.engines.validation.records import MOST_LINES
from tandemrt.runtime.grammars.schema.dialect import Schema
from tandemrt.runtime.grammars.schema.document import Document, UnsupportedSchema
from tandemrt.runtime.grammars.schema.expand import Expander
from tandemrt.runtime.grammars.schema.shapes import (
    ANYTHING,
    AllOf,
    Array,
    Literals,
    Number,
    Object,
    Plain,
    Ref,
    Shape,
    String,
)  # fmt: skip

MAX_PLACES = 20_000
_MAX_INLINE_DEPTH = 12  # nested levels without a reference
_DOUBLE = 2**53  # integers up to here are exact doubles


def enforceable(schema: Schema, *, closed: bool = True, quick: bool = False) -> dict[str, Any]:
    """Return the schema to compile, in a form that the grammar enforces exactly.

    The result may be stricter than ``schema``, never looser.

    ``closed``: objects with ``properties`` allow no other names unless ``additionalProperties`` does.

    Raises:
        BadRequest: an invalid JSON schema, unsupported keywords (one line for each place), or no finite value fits.
        NotQuick: ``quick`` is set and the conversion takes more than ``expand.QUICK_STEPS``.
    """
    return _Writer(Expander(Document(schema), closed=closed, quick=quick)).write()


def relaxed(schema: Schema, *, closed: bool = True, quick: bool = False) -> dict[str, Any]:
    """Return a looser schema without unsupported keywords, for requests that validate the finished text.

    Raises:
        BadRequest: an invalid JSON schema, or no finite value fits.
        NotQuick: as in ``enforceable``.
    """
    try:
        return enforceable(schema, closed=closed, quick=quick)
    except BadRequest:
        return _Writer(Expander(Document(schema), closed=closed, loose=True, quick=quick)).write()


class _Writer:
    def __init__(self, expander: Expander) -> None:
        self._expander = expander
        self._shapes: dict[AllOf, list[Shape]] = {}
        self._problems: dict[str, None] = {}
        self._open: set[AllOf] = {ANYTHING}  # written as {}: any value, or unsupported keywords

    def write(self) -> dict[str, Any]:
        root = self._found(AllOf(self._expander.document.root))
        self._explore(root)
        if self._problems and not self._expander.loose:
            _reject(list(self._problems))
        if root in self._open:
            return {}
        self._drop_infinite()
        self._check_cycles()
        if not self._shapes[root]:
            _reject(["#: no finite text fits the schema; look for contradictions and for references without an end"])
        self._uses = dict.fromkeys(self._shapes, 0)
        self._uses[root] = 1
        for shapes in self._shapes.values():
            for shape in shapes:
                for child in _children(shape):
                    if self._found(child) in self._uses:
                        self._uses[self._found(child)] += 1
        self._names: dict[AllOf, str] = {}
        self._pending: list[AllOf] = []
        written = self._union(root, 0)
        definitions: dict[str, Any] = {}
        while self._pending:
            all_of = self._pending.pop()
            definitions[self._names[all_of]] = self._union(all_of, 0)
        return {**written, "$defs": definitions} if definitions else written

    def _found(self, all_of: AllOf) -> AllOf:
        try:
            return self._expander.canonical(all_of)
        except UnsupportedSchema as problem:
            self._problems.setdefault(str(problem))
            return ANYTHING

    def _explore(self, root: AllOf) -> None:
        pending = [root]
        while pending:
            all_of = pending.pop()
            if all_of in self._shapes:
                continue
            try:
                if len(self._shapes) > MAX_PLACES:
                    raise UnsupportedSchema("#", f"more than {MAX_PLACES} combinations of schemas; simplify it")
                shapes = self._expander.shapes(all_of) if all_of.nodes else []
            except UnsupportedSchema as problem:
                self._problems.setdefault(str(problem))
                self._open.add(all_of)
                shapes = []
            except RecursionError:
                self._problems.setdefault("#: schemas that apply together are nested too deep; flatten them")
                self._open.add(all_of)
                shapes = []
            self._shapes[all_of] = shapes
            if len(self._shapes) > MAX_PLACES + 1:
                return
            for shape in shapes:
                pending += [self._found(child) for child in reversed(_children(shape))]

    def _drop_infinite(self) -> None:
        """Drop the shapes that only infinitely nested values fit."""
        ending = set(self._open)
        grown = True
        while grown:
            grown = False
            for all_of, shapes in self._shapes.items():
                if all_of not in ending and any(self._ends(shape, ending) for shape in shapes):
                    ending.add(all_of)
                    grown = True
        for all_of, shapes in self._shapes.items():
            self._shapes[all_of] = [shape for shape in shapes if self._ends(shape, ending)]

    def _ends(self, shape: Shape, ending: set[AllOf]) -> bool:
        if isinstance(shape, Ref):
            return self._found(shape.target) in ending
        if isinstance(shape, Object):
            return all(self._found(shape.properties[name]) in ending for name in shape.required)
        if isinstance(shape, Array):
            needed = shape.first[: shape.least]
            more = [shape.rest] if shape.least > len(shape.first) else []
            return all(child is not None and self._found(child) in ending for child in [*needed, *more])
        return True

    def _check_cycles(self) -> None:
        """Reject references that lead back to themselves without writing any text."""
        done: set[AllOf] = set()
        for start in self._shapes:
            path: list[tuple[AllOf, list[AllOf]]] = [(start, self._same(start))] if start not in done else []
            active = {start}
            while path:
                all_of, left = path[-1]
                if not left:
                    path.pop()
                    active.discard(all_of)
                    done.add(all_of)
                    continue
                following = left.pop()
                if following in active:
                    _reject([f"{following.nodes[0].place}: only refers to itself; point the reference to a schema"])
                if following not in done:
                    active.add(following)
                    path.append((following, self._same(following)))

    def _same(self, all_of: AllOf) -> list[AllOf]:
        return [self._found(shape.target) for shape in self._shapes[all_of] if isinstance(shape, Ref)]

    def _schema(self, all_of: AllOf | None, depth: int) -> Any:
        """Return the schema of a place, or a reference to its definition."""
        if all_of is None:
            return False
        all_of = self._found(all_of)
        if all_of in self._open:
            return {}
        shapes = self._shapes[all_of]
        if not shapes:
            return False
        small = all(isinstance(shape, Plain | Number | String) or _is_short(shape) for shape in shapes)
        if small or (self._uses[all_of] == 1 and depth < _MAX_INLINE_DEPTH):
            return self._union(all_of, depth + 1)
        if all_of not in self._names:
            self._names[all_of] = str(len(self._names))
            self._pending.append(all_of)
        return {"$ref": f"#/$defs/{self._names[all_of]}"}

    def _union(self, all_of: AllOf, depth: int) -> dict[str, Any]:
        written = [self._shape(shape, depth) for shape in self._shapes[all_of]]
        unlike: list[Any] = []
        for one in written:
            without = {keyword: value for keyword, value in one.items() if keyword != "uniqueItems"}
            if one not in unlike and (len(without) == len(one) or without not in written):
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
        if isinstance(shape, Ref):
            return self._schema(shape.target, depth)
        if isinstance(shape, Array):
            written: dict[str, Any] = {"type": "array"}
            if shape.first:
                written["prefixItems"] = [self._schema(item, depth) for item in shape.first]
            written["items"] = self._schema(shape.rest, depth)
            if shape.unique:
                written["uniqueItems"] = True  # grammars/unique enforces it
            return written | _limits(shape, "minItems", "maxItems")
        return self._object(shape, depth)

    def _object(self, shape: Object, depth: int) -> dict[str, Any]:
        properties = {name: self._schema(all_of, depth) for name, all_of in shape.properties.items()}
        named = {f"^{pattern}$": self._schema(all_of, depth) for pattern, all_of in shape.patterns.items()}
        rest = self._schema(shape.rest, depth)
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
    """Round a bound to the nearest double that allows no number outside the bound.

    llguidance reads a bound as a double. For an integer type it takes the value of that double, and else its shortest
    decimal form: 2^60 as 1152921504606847000.
    """
    if bound.denominator == 1 and abs(bound) <= _DOUBLE:
        return int(bound)
    number = float(bound)
    while _is_outside(number, bound, up):
        number = math.nextafter(number, math.inf if up else -math.inf)
    return int(number) if number.is_integer() else number


def _is_outside(number: float, bound: Fraction, up: bool) -> bool:
    meant = [Fraction(repr(number)), *([Fraction(number)] if number.is_integer() else [])]
    return any(each < bound if up else each > bound for each in meant)


def _decimal(step: Fraction) -> int | float:
    return int(step) if step.denominator == 1 else float(step)


def _is_short(shape: Shape) -> bool:
    return (
        isinstance(shape, Literals)
        and len(shape.values) <= 8
        and not any(isinstance(v, list | dict) for v in shape.values)
    )


def _children(shape: Shape) -> list[AllOf]:
    if isinstance(shape, Ref):
        return [shape.target]
    if isinstance(shape, Array):
        return [*shape.first, *([shape.rest] if shape.rest is not None else [])]
    if isinstance(shape, Object):
        rest = [shape.rest] if shape.rest is not None else []
        return [*shape.properties.values(), *shape.patterns.values(), *rest]
    return []


def _reject(problems: list[str]) -> None:
    lines = [f"- {problem}" for problem in problems[:MOST_LINES]]
    if len(problems) > MOST_LINES:
        lines.append(f"- and {len(problems) - MOST_LINES} more")
    raise BadRequest(
        "structured_outputs.json: the grammar cannot enforce\n"
        + "\n".join(lines)
        + "\nChange the schema, or set validate_output=True to have the finished text checked instead"
    )
