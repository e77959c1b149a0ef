"""A schema document: base URIs of its subschemas, and resolution of references."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import jsonschema
import referencing

from tandemrt.engines.validation.errors import clipped, quoted
from tandemrt.runtime.grammars.schema.dialect import (
    REF_STANDS_ALONE,
    UNEVALUATED,
    Schema,
    check_valid,
    dialect_of,
    keywords,
)
from tandemrt.runtime.grammars.schema.validators import validator_of

MAX_PATTERN_TEXT = 16  # longer literal texts are not matched against patterns
_PATTERNS = frozenset({"pattern", "patternProperties"})
_ONE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


class UnsupportedSchema(Exception):
    """A schema that a grammar cannot enforce: the place, the reason, and a remedy."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")


@dataclass(frozen=True)
class Node:
    """A subschema and where it is. Nodes with equal ``name`` are equal."""

    schema: Schema
    place: str  # JSON pointer of the schema, or of the schema that it is derived from
    base: str  # URI of its resource, "" for none
    name: str
    condition: bool = False  # inside `if` or `not`: its properties do not close the object
    negated: bool = False  # inside `not`: the names and items that it describes are not evaluated

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.name == other.name

    def derived(self, schema: Schema, how: str, *, condition: bool = True) -> "Node":
        """Return a node for a ``schema`` derived from this one; ``how`` makes its name unique.

        ``condition``: it restates a condition, so that its properties neither close an object nor are evaluated.
        """
        name = f"{self.name}!{_named(how)}"
        return Node(schema, self.place, self.base, name, condition or self.condition, condition or self.negated)

    def without(self, *keywords: str) -> "Node":
        """Return the node without ``keywords``, after they were expanded."""
        if not isinstance(self.schema, dict):
            return self
        rest = {key: value for key, value in self.schema.items() if key not in keywords}
        if "dependencies" in rest:  # the older form of both
            kept = {
                name: needs
                for name, needs in rest["dependencies"].items()
                if ("dependentRequired" if isinstance(needs, list) else "dependentSchemas") not in keywords
            }
            rest["dependencies"] = kept
        return replace(self, schema=rest, name=f"{self.name}!-{'-'.join(keywords)}")

    def without_unevaluated(self) -> "Node":
        """Return the node without the keywords that depend on other schemas of the same value."""
        has_some = isinstance(self.schema, dict) and not self.schema.keys().isdisjoint(UNEVALUATED)
        return self.without(*UNEVALUATED) if has_some else self

    def as_condition(self) -> "Node":
        return replace(self, condition=True, name=f"{self.name}!asking")

    @property
    def is_remainder(self) -> bool:
        return "!-" in self.name

    @property
    def source_name(self) -> str:
        """The name before ``without``: a node without some keywords has the same subschemas as the original."""
        return "!".join(part for part in self.name.split("!") if not part.startswith("-"))


class Document:
    """The nodes of one schema. Raises BadRequest for an invalid JSON schema."""

    def __init__(self, root: Schema) -> None:
        self.dialect = dialect_of(root)
        self._root = root
        self._bases: dict[str, str] = {}
        self._resources: dict[str, tuple[str, Schema]] = {}
        self._anchors: dict[tuple[str, str], list[tuple[str, Schema]]] = {}
        self._validators: dict[tuple[str, bool], jsonschema.protocols.Validator] = {}
        self._keywords: dict[str, dict[str, Any]] = {}
        self._dynamic: dict[str, int] = {}  # how often each dynamic anchor occurs
        self._resources[""] = ("#", root)
        self._read(root, "#", "")

    @property
    def has_several_bases(self) -> bool:
        """Whether nodes have different base URIs."""
        return len(set(self._bases.values())) > 1

    @property
    def root(self) -> Node:
        return Node(self._root, "#", self._bases["#"], "#")

    def keywords(self, node: Node) -> dict[str, Any]:
        """Return the keywords of a node that constrain values, in the forms of 2020-12. Do not change the result."""
        if node.name not in self._keywords:
            schema = node.schema
            self._keywords[node.name] = keywords(schema, self.dialect) if isinstance(schema, dict) else {}
        return self._keywords[node.name]

    def child(self, node: Node, schema: Schema, *path: str | int) -> Node:
        """Return the subschema of ``node`` at ``path``."""
        place = "/".join([node.place, *map(escaped, path)])
        name = "/".join([node.source_name, *(_named(escaped(step)) for step in path)])
        if place not in self._bases and isinstance(schema, dict) and "$id" in schema:
            raise UnsupportedSchema(place, "a nested $id is not supported here; leave it out")
        return Node(schema, place, self._bases.get(place, node.base), name, node.condition, node.negated)

    def resolve(self, node: Node, reference: str) -> Node:
        """Return the target of ``reference`` in ``node``. Raises UnsupportedSchema."""
        uri, fragment = urldefrag(reference)
        base = node.base if not uri else urldefrag(urljoin(node.base, uri))[0]
        fragment = unquote(fragment)
        place = f"{node.place}/$ref"
        if base not in self._resources:
            raise UnsupportedSchema(place, f"{quoted(reference)} is not in this schema; put its target under $defs")
        target: Any
        at, target = self._resources[base]
        if fragment and not fragment.startswith("/"):
            targets = self._anchors.get((base, fragment), [])
            if len(targets) != 1:
                raise UnsupportedSchema(
                    place, f"{quoted(reference)} is not one place in this schema; use '#/$defs/name'"
                )
            at, target = targets[0]
            return self._target(node, target, at)
        for step in fragment.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                raise UnsupportedSchema(
                    place, f"{quoted(reference)} is not a place in this schema such as '#/$defs/name'"
                )
            at = f"{at}/{escaped(key)}"
            base = self._bases.get(at, base)
        if at not in self._bases:  # not read as a schema yet
            check_valid(target, self.dialect, at)
            if not isinstance(target, dict | bool):
                raise UnsupportedSchema(place, f"{quoted(reference)} is not a schema; point it to one")
            self._read(target, at, base)
        return self._target(node, target, at)

    def _target(self, node: Node, target: Schema, at: str) -> Node:
        """Return the node at ``at`` that a reference in ``node`` leads to."""
        name = f"{_named(at)}!negated" if node.negated else _named(at)
        return Node(target, at, self._bases[at], name, negated=node.negated)

    def is_plain(self, reference: str) -> bool:
        """Return whether a dynamic reference has the same target from every place."""
        return self._dynamic.get(urldefrag(reference)[1], 0) <= 1 and not self.has_several_bases

    def is_valid(self, node: Node, value: Any) -> bool:
        """Return whether ``value`` is valid for a node, by the jsonschema package.

        Raises UnsupportedSchema if that may take unbounded time: Python's `re` can, on a long text.
        """
        if _longest_text(value) > MAX_PATTERN_TEXT and self._may_try_patterns(node.schema):
            raise UnsupportedSchema(
                node.place, f"a pattern is not tried on a given text of more than {MAX_PATTERN_TEXT} characters"
            )
        derived = "!" in node.source_name  # with keywords of newer drafts
        if (node.base, derived) not in self._validators:
            _, resource = self._resources[node.base]
            # An empty registry keeps references to other documents from being fetched.
            validator = validator_of(self.dialect, newer=derived)(resource, registry=referencing.Registry())
            self._validators[node.base, derived] = validator
        try:
            return bool(self._validators[node.base, derived].evolve(schema=node.schema).is_valid(value))
        except (referencing.exceptions.Unresolvable, RecursionError):
            raise UnsupportedSchema(node.place, "its values cannot be checked; simplify its references") from None
        except re.error as error:  # a pattern that Python does not read, such as a group named as in JavaScript
            raise UnsupportedSchema(node.place, f"its values cannot be checked: {clipped(error)}") from None

    def _may_try_patterns(self, schema: Any) -> bool:
        words = set(_words(schema))
        refers = not words.isdisjoint({"$ref", "$dynamicRef", "$recursiveRef"})
        return not words.isdisjoint(_PATTERNS) or (refers and self._has_patterns)

    @cached_property
    def _has_patterns(self) -> bool:
        return any(not _PATTERNS.isdisjoint(_words(resource)) for _, resource in self._resources.values())

    def _read(self, schema: Any, place: str, base: str) -> None:
        """Record the base URI and the anchors of a schema and of its subschemas."""
        if not isinstance(schema, dict | bool):
            return
        if isinstance(schema, dict):
            identifier = schema.get("id" if self.dialect == "draft-04" else "$id")
            if isinstance(identifier, str) and not ("$ref" in schema and self.dialect in REF_STANDS_ALONE):
                uri, fragment = urldefrag(identifier)
                if uri:
                    base = urldefrag(urljoin(base, uri))[0]
                    self._resources.setdefault(base, (place, schema))
                if fragment:
                    self._anchors.setdefault((base, fragment), []).append((place, schema))
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(schema.get(key), str):
                    self._anchors.setdefault((base, schema[key]), []).append((place, schema))
            if "$dynamicAnchor" in schema:
                self._dynamic[schema["$dynamicAnchor"]] = self._dynamic.get(schema["$dynamicAnchor"], 0) + 1
        self._bases[place] = base
        if isinstance(schema, dict):
            for path, child in subschemas(schema):
                self._read(child, "/".join([place, *map(escaped, path)]), base)


def escaped(step: str | int) -> str:
    """Escape one step of a JSON pointer."""
    return str(step).replace("~", "~0").replace("/", "~1")


def _named(place: str) -> str:
    return place.replace("!", "~2")  # in names, `!` separates the place from how the node was derived


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            yield from (((key, name), child) for name, child in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from (((key, index), child) for index, child in enumerate(value))
        elif key in _ONE + UNEVALUATED:
            yield (key,), value


def _words(value: Any) -> Iterator[str]:
    """Yield the keys of all objects within ``value``."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _words(each)


def _longest_text(value: Any) -> int:
    """Return the length of the longest string within ``value``, object keys included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return max((_longest_text(each) for pair in value.items() for each in pair), default=0)
    return max(map(_longest_text, value), default=0) if isinstance(value, list) else 0
