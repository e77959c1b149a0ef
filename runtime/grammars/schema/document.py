"""A schema as a document: its nodes, their bases, and what its references lead to."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import jsonschema
import referencing

from tandemrt.engines.errors import quoted
from tandemrt.runtime.grammars.schema.dialect import (
    REF_STANDS_ALONE,
    Schema,
    check_valid,
    dialect_of,
    keywords,
    validator_of,
)

_ONE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_ONE_MORE = ("unevaluatedItems", "unevaluatedProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


class Unheld(Exception):
    """What a grammar cannot hold: the place, why, and what to do."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")


@dataclass(frozen=True)
class Node:
    """A schema at its place. Two nodes are the same iff ``name`` is."""

    schema: Schema
    place: str  # JSON pointer of the schema, or of the one that it was made from
    base: str  # URI of the resource it belongs to, "" if it has none
    name: str
    condition: bool = False  # it only asks: what it names is not thereby a property that an object may have

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.name == other.name

    def made(self, schema: Schema, how: str, *, condition: bool = True) -> "Node":
        """A schema that follows from this one; ``how`` tells all that follow apart."""
        return Node(schema, self.place, self.base, f"{self.name}!{_named(how)}", condition or self.condition)

    def without(self, *keywords: str) -> "Node":
        """What is left once ``keywords`` have been followed."""
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

    def asking(self) -> "Node":
        return replace(self, condition=True, name=f"{self.name}!asking")

    @property
    def is_rest(self) -> bool:
        return "!-" in self.name

    @property
    def whole_name(self) -> str:
        """The name before anything was followed: what is left of a schema has the same subschemas."""
        return "!".join(part for part in self.name.split("!") if not part.startswith("-"))


class Document:
    """The nodes of one schema. Raises BadRequest for what is no JSON schema."""

    def __init__(self, root: Schema) -> None:
        self.dialect = dialect_of(root)
        self._root = root
        self._bases: dict[str, str] = {}
        self._resources: dict[str, tuple[str, Schema]] = {}
        self._anchors: dict[tuple[str, str], list[tuple[str, Schema]]] = {}
        self._validators: dict[str, jsonschema.protocols.Validator] = {}
        self._keywords: dict[str, dict[str, Any]] = {}
        self._dynamic: dict[str, int] = {}  # how often each dynamic anchor occurs
        self._resources[""] = ("#", root)
        self._read(root, "#", "")

    @property
    def several(self) -> bool:
        """Whether nodes have different bases."""
        return len(set(self._bases.values())) > 1

    @property
    def root(self) -> Node:
        return Node(self._root, "#", self._bases["#"], "#")

    def keywords(self, node: Node) -> dict[str, Any]:
        """The keywords of a node that mean something, in the forms of 2020-12; nobody changes them."""
        if node.name not in self._keywords:
            schema = node.schema
            self._keywords[node.name] = keywords(schema, self.dialect) if isinstance(schema, dict) else {}
        return self._keywords[node.name]

    def child(self, node: Node, schema: Schema, *path: str | int) -> Node:
        """The subschema of ``node`` at ``path``."""
        place = "/".join([node.place, *map(escaped, path)])
        name = "/".join([node.whole_name, *(_named(escaped(step)) for step in path)])
        if place not in self._bases and isinstance(schema, dict) and "$id" in schema:
            raise Unheld(place, "a base of its own ($id) is not held here; leave it out")
        return Node(schema, place, self._bases.get(place, node.base), name, node.condition)

    def resolve(self, node: Node, reference: str) -> Node:
        """What ``reference``, standing in ``node``, leads to. Raises Unheld."""
        uri, fragment = urldefrag(reference)
        base = node.base if not uri else urldefrag(urljoin(node.base, uri))[0]
        fragment = unquote(fragment)
        place = f"{node.place}/$ref"
        if base not in self._resources:
            raise Unheld(place, f"{quoted(reference)} is not in this schema; put what it names under $defs")
        target: Any
        at, target = self._resources[base]
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((base, fragment), [])
            if len(found) != 1:
                raise Unheld(place, f"{quoted(reference)} is not one place in this schema; use '#/$defs/name'")
            at, target = found[0]
            return Node(target, at, self._bases[at], _named(at))
        for step in fragment.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                raise Unheld(place, f"{quoted(reference)} is not a place in this schema such as '#/$defs/name'")
            at = f"{at}/{escaped(key)}"
            base = self._bases.get(at, base)
        if at not in self._bases:  # nobody has read it as a schema so far
            check_valid(target, self.dialect, at)
            if not isinstance(target, dict | bool):
                raise Unheld(place, f"{quoted(reference)} is no schema; point it to one")
            self._read(target, at, base)
        return Node(target, at, self._bases[at], _named(at))

    def is_plain(self, reference: str) -> bool:
        """Whether a dynamic reference leads to one place whoever refers."""
        return self._dynamic.get(urldefrag(reference)[1], 0) <= 1 and not self.several

    def holds(self, node: Node, value: Any) -> bool:
        """Whether ``value`` satisfies a node, by the jsonschema package."""
        if self.dialect == "draft-04" and "!" in node.whole_name:  # made here, in a newer form
            raise Unheld(node.place, "values beside a condition are not held in draft-04; use a later one")
        if node.base not in self._validators:
            _, resource = self._resources[node.base]
            # An empty registry keeps references to other documents from being fetched.
            validator = validator_of(self.dialect)(resource, registry=referencing.Registry())
            self._validators[node.base] = validator
        try:
            return bool(self._validators[node.base].evolve(schema=node.schema).is_valid(value))
        except (referencing.exceptions.Unresolvable, RecursionError):
            raise Unheld(node.place, "its values cannot be checked; simplify its references") from None

    def _read(self, schema: Any, place: str, base: str) -> None:
        """Note the base of a schema and of all within, and the anchors."""
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
            for path, child in _subschemas(schema):
                self._read(child, "/".join([place, *map(escaped, path)]), base)


def escaped(step: str | int) -> str:
    """A step of a JSON pointer."""
    return str(step).replace("~", "~0").replace("/", "~1")


def _named(place: str) -> str:
    return place.replace("!", "~2")  # what follows a `!` in a name is how a node was made


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            yield from (((key, name), child) for name, child in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from (((key, index), child) for index, child in enumerate(value))
        elif key in _ONE + _ONE_MORE:
            yield (key,), value
