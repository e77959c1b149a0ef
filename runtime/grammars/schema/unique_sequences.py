"""Lower arrays with ``uniqueItems``: list the sequences if they are few, and reject arrays that may get stuck.

An array gets stuck if it needs another item, and earlier items have all values of that item.
"""

from dataclasses import replace
from typing import Any

from tandemrt.engines.validation.errors import quoted
from tandemrt.runtime.grammars.schema.document import UnsupportedSchema
from tandemrt.runtime.grammars.schema.expansion import Expansion
from tandemrt.runtime.grammars.schema.shapes import AllOf, Array, Literals, Plain, Shape

MAX_SEQUENCES = 400
_MAX_BEGINNINGS = 4 * MAX_SEQUENCES  # of sequences, that are tried


class UniqueSequences:
    """The sequences of one array with unique items."""

    def __init__(self, shape: Array, expander: Expansion) -> None:
        self._shape = shape
        self._expander = expander
        self._first = [self._values(item) for item in shape.first]
        self._rest = [] if shape.rest is None else self._values(shape.rest)
        self._most = shape.most
        if self._rest is not None:
            longest = len(shape.first) + len(self._rest)
            self._most = longest if shape.most is None else min(shape.most, longest)

    def shapes(self, place: str) -> list[Shape]:
        """Return the array as listed sequences or as one shape. Raises UnsupportedSchema if it may get stuck."""
        least = self._shape.least
        if self._most is not None and least > self._most:
            return []
        sequences = self._listed()
        if sequences is not None:
            return [Literals(sequences)] if sequences else []
        for index in range(1, least):
            values = self._values_at(index)
            if values is None:
                if index >= len(self._first):
                    break  # all further items are alike
            elif sum(self._may_have(before, values) for before in range(index)) >= len(values):
                raise UnsupportedSchema(
                    f"{place}/uniqueItems",
                    f"the {len(values)} values of item {index} may all be in earlier items, which is not supported; "
                    f"lower minItems, received {quoted(least)}",
                )
        return [replace(self._shape, most=self._most)]

    def _listed(self) -> list[list[Any]] | None:
        """Return all sequences, or None if there are more than ``MAX_SEQUENCES``, or not a list of values each."""
        if self._most is None:
            return None
        sequences: list[list[Any]] = []
        pending: list[list[Any]] = [[]]
        for _ in range(_MAX_BEGINNINGS):
            if not pending:
                return sequences
            begun = pending.pop()
            if len(begun) >= self._shape.least:
                sequences.append(begun)
            if len(sequences) > MAX_SEQUENCES:
                return None
            if len(begun) < self._most:
                values = self._values_at(len(begun))
                if values is None:
                    return None
                pending += [[*begun, value] for value in reversed(values) if not _has(begun, value)]
        return None

    def _values_at(self, index: int) -> list[Any] | None:
        return self._first[index] if index < len(self._first) else self._rest

    def _may_have(self, index: int, values: list[Any]) -> bool:
        """Return whether one of ``values`` may be the item at ``index``."""
        ours = self._values_at(index)
        if ours is not None:
            return any(_has(ours, value) for value in values)
        item = self._shape.first[index] if index < len(self._first) else self._shape.rest
        assert item is not None
        try:
            return any(all(self._expander.document.is_valid(node, value) for node in item.nodes) for value in values)
        except UnsupportedSchema:
            return True

    def _values(self, items: AllOf) -> list[Any] | None:
        """Return the distinct values of items, or None if these are not finite, or refer to their own array."""
        try:
            shapes = self._expander.resolved(items)
        except UnsupportedSchema:
            return None
        values: list[Any] = []
        for shape in shapes:
            if isinstance(shape, Literals):
                candidates = shape.values
            elif isinstance(shape, Plain):
                candidates = [None] if shape.kind == "null" else [True, False]
            else:
                return None
            values += [value for value in candidates if not _has(values, value)]
        return values


def _has(values: list[Any], value: Any) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)
