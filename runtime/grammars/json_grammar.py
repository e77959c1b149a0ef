"""Write the llguidance (Lark) rules of a JSON schema from ``schema.emit``, which has few keywords."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from tandemrt.runtime.grammars.regex import json_string
from tandemrt.runtime.grammars.regex.json_number import INTEGER, NUMBER, at_least, at_most

if TYPE_CHECKING:
    from tandemrt.engines.parameters.sampling import Whitespace

# Between two tokens of JSON. `compact` has one layout, in the separators.
_WHITESPACE: "Mapping[Whitespace, str]" = {"compact": "", "bounded": r" |\n{1,2}[ \t]{0,32}", "any": r"[ \n\r\t]+"}
_BOUNDS = (
    ("minimum", at_least, True),
    ("exclusiveMinimum", at_least, False),
    ("maximum", at_most, True),
    ("exclusiveMaximum", at_most, False),
)
_TERMINAL = re.compile(r"\bT\d+\b")


def json_rules(schema: Any, whitespace: "Whitespace", fits: Callable[[str], bool]) -> str:
    """Return the rules of a schema; ``start`` is the JSON text.

    ``fits``: return whether a text fits the terminal T of some rules.

    Raises ValueError if no value fits the schema, or if two patterns of ``patternProperties`` match one name.
    """
    return _JsonGrammar(whitespace, fits).write(schema)


def nested_rule(schema: Any, whitespace: "Whitespace", fits: Callable[[str], bool]) -> str:
    """Return an expression for a JSON text within other rules. See ``json_rules``."""
    if _is_multiple(schema):
        return _multiple(schema, whitespace)
    return f"%lark {{\n{json_rules(schema, whitespace, fits)}\n}}"


class _JsonGrammar:
    def __init__(self, whitespace: "Whitespace", fits: Callable[[str], bool]) -> None:
        self._whitespace = whitespace
        self._fits = fits
        self._comma, self._colon = ('", "', '": "') if whitespace == "compact" else ('","', '":"')
        self._names: dict[str, str] = {}  # of rules and terminals, by their expressions
        self._references: dict[str, str] = {}  # names of rules of definitions and of any value
        self._written: dict[str, str] = {}
        self._definitions: Mapping[str, Any] = {}

    def write(self, schema: Any) -> str:
        definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        self._definitions = {"#": schema, **{f"#/$defs/{name}": each for name, each in definitions.items()}}
        start = self._value(schema)
        if start is None:
            raise ValueError("no value fits the schema")
        space = _WHITESPACE[self._whitespace]
        return "\n".join(
            [
                '%llguidance {"ignore_once": true}',  # also without space: other rules do not share the terminals
                *([f"%ignore /{space}/"] if space else []),
                f"start: {start}",
                *(f"{name}: {expression}" for name, expression in self._written.items()),
            ]
        )

    def _value(self, schema: Any) -> str | None:
        """Return an expression for a value, or None if there is no value."""
        match schema:
            case False:
                return None
            case {"$ref": str(reference)}:
                return self._shared(reference, self._definitions[reference])
            case {"anyOf": [*ways]}:
                return self._any_of(ways)
            case {"enum": [*values]}:
                return self._enum(values)
            case {"type": "array"}:
                return self._array(schema)
            case {"type": "object"}:
                return self._object(schema)
            case {"type": "string"}:
                return self._string(schema)
            case {"type": "integer" | "number"}:
                return self._number(schema)
            case {"type": "boolean"}:
                return self._terminal("/true|false/")
            case {"type": "null"}:
                return self._terminal('"null"')
        return self._any()

    def _any(self) -> str:
        kinds = ("string", "number", "boolean", "null", "array", "object")
        return self._shared("", {"anyOf": [{"type": kind} for kind in kinds]})

    def _shared(self, reference: str, schema: Any) -> str:
        """Return the name of a rule that may contain itself."""
        if reference not in self._references:
            name = self._references[reference] = f"shared_{len(self._references)}"
            expression = self._value(schema)
            if expression is None:
                raise ValueError(f"no value fits {reference}")
            self._written[name] = expression
        return self._references[reference]

    def _number(self, schema: Mapping[str, Any]) -> str:
        if _is_multiple(schema):
            return self._rule(_multiple(schema, self._whitespace))
        integer = schema["type"] == "integer"
        parts = [
            bounded(schema[keyword], integer=integer, inclusive=inclusive)
            for keyword, bounded, inclusive in _BOUNDS
            if keyword in schema
        ]
        return self._terminal(" & ".join(f"/{part}/" for part in parts or [INTEGER if integer else NUMBER]))

    def _any_of(self, ways: Sequence[Any]) -> str | None:
        expressions = [one for one in map(self._value, ways) if one is not None]
        terminals = [one for one in expressions if _is_terminal(one)]
        others = [one for one in expressions if not _is_terminal(one)]
        if len(terminals) > 1:  # one terminal is faster than several
            terminals = [self._terminal(_either(terminals))]
        return _either([*terminals, *others]) if expressions else None

    def _enum(self, values: Sequence[Any]) -> str:
        scalars = [_literal(value) for value in values if not isinstance(value, list | dict)]
        parts = [self._literal(value) for value in values if isinstance(value, list | dict)]
        return _either([*([self._terminal(_either(scalars))] if scalars else []), *parts])

    def _literal(self, value: Any) -> str:
        if isinstance(value, list):
            items = f" {self._comma} ".join(map(self._literal, value))
            return f'"[" {items} "]"'
        if isinstance(value, dict):
            pairs = (f"{self._name(name)} {self._colon} {self._literal(part)}" for name, part in value.items())
            return f'"{{" {f" {self._comma} ".join(pairs)} "}}"'
        return self._terminal(_literal(value))

    def _array(self, schema: Mapping[str, Any]) -> str | None:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        items = [self._value(item) for item in first]
        rest = self._value(rest)
        possible = next((at for at, item in enumerate(items) if item is None), len(items))
        if possible < len(items):
            most, rest = min(possible, possible if most is None else most), None
        if rest is None:
            most = len(items) if most is None else min(len(items), most)
        if most is not None and least > most:
            return None
        full = rest is None or (most is not None and most <= len(items))
        more = "" if full else self._repeated(self._rule(rest), len(items), least, most)
        for at in range(min(len(items), len(items) if most is None else most) - 1, -1, -1):
            item = f"{self._comma if at else ''} {items[at]} {more}"
            more = item if at < least else f"({item})?"
        return f'"[" {more} "]"'

    def _repeated(self, one: str, before: int, least: int, most: int | None) -> str:
        """Return an expression for the items or pairs, by the rule ``one``, after the first ``before`` ones.

        ``least`` and ``most`` count those before, too; ``most`` leaves room for more.
        """
        least, most = max(0, least - before), None if most is None else most - before
        if before:
            return self._times(f"({self._comma} {one})", least, most)
        more = self._times(f"({one} {self._comma})", max(0, least - 1), None if most is None else most - 1)
        return f"{more} {one}" if least else f"({more} {one})?"

    def _times(self, expression: str, least: int, most: int | None) -> str:
        return "" if most == 0 else expression + _repeats(least, most)

    def _object(self, schema: Mapping[str, Any]) -> str | None:
        required = frozenset(schema.get("required", ()))
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        pairs: list[tuple[str, bool]] = []
        for name, value in schema.get("properties", {}).items():
            expression = self._value(value)
            if expression is not None:
                pairs.append((self._rule(f"{self._name(name)} {self._colon} {expression}"), name in required))
            elif name in required:
                return None
        others = self._other_pairs(schema)
        counted = max(least, 1) if most is None else most  # higher counts make no difference
        after: list[str | None] = [self._others(others, count, least, most) for count in range(counted + 1)]
        for at in range(len(pairs) - 1, -1, -1):
            pair, needed = pairs[at]
            after = [self._pair(pair, needed, after, count, most) for count in range(min(counted, at) + 1)]
        return None if after[0] is None else f'"{{" {after[0]} "}}"'

    def _pair(self, pair: str, needed: bool, after: list[str | None], count: int, most: int | None) -> str | None:
        """Return an expression for a pair and what follows it, or for what follows it alone.

        ``count``: the number of pairs before it. ``after``: what follows each number of pairs that makes a difference.
        """
        more = None if count == most else after[min(count + 1, len(after) - 1)]
        none = None if needed else after[count]
        comma = f"{self._comma} " if count else ""
        if more is not None and more == none:
            return self._rule(f"({comma}{pair})? {more}")
        ways = [*([f"{comma}{pair} {more}"] if more is not None else []), *([none] if none is not None else [])]
        if not ways:
            return None
        if "" in ways:
            return self._rule(f"({ways[0]})?") if ways[0] else ""
        return self._rule(_either(ways))

    def _other_pairs(self, schema: Mapping[str, Any]) -> str | None:
        """Return the name of a rule for a pair whose name is no listed property, or None if there is none."""
        listed = [_literal(name) for name in schema.get("properties", {})]
        named = schema.get("patternProperties", {})
        matched = [f"/{json_string.name_of(pattern[1:-1])}/" for pattern in named]  # they are written as ^...$
        for one, other in combinations(matched, 2):
            if self._is_possible([one, other]):
                raise ValueError("patterns of patternProperties match the same name")
        pairs = []
        for pattern, value in zip(matched, named.values(), strict=True):
            if (expression := self._value(value)) is not None:
                pairs.append(f"{self._excluding(pattern, listed)} {self._colon} {expression}")
        if (expression := self._value(schema.get("additionalProperties", True))) is not None:
            excluded = [*listed, *matched]
            name = (
                self._excluding(self._quoted(json_string.name_character(), "*"), excluded)
                if excluded
                else self._string({})
            )
            pairs.append(f"{name} {self._colon} {expression}")
        return self._rule(_either(pairs)) if pairs else None

    def _excluding(self, name: str, excluded: Sequence[str]) -> str:
        return self._terminal(f"{name} & ~{_either(excluded)}" if excluded else name)

    def _others(self, pair: str | None, count: int, least: int, most: int | None) -> str | None:
        """Return an expression for the pairs after the listed properties, of which there are ``count``."""
        if pair is None or count == most:
            return None if least > count else ""
        return self._repeated(pair, count, least, most)

    def _name(self, name: str) -> str:
        return self._terminal(_literal(name))

    def _string(self, schema: Mapping[str, Any]) -> str | None:
        """Return the terminal of a string, or None if no string fits."""
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        patterned = [each["pattern"][1:-1] for each in (schema, *schema.get("allOf", ())) if "pattern" in each]
        parts = [f"/{json_string.string_of(each)}/" for each in patterned]
        if not parts or least or most is not None:
            text = self._quoted(json_string.character(*patterned[:1]), _repeats(least, most))
            parts.append(json_string.literal("") if most == 0 else text)
        return None if len(parts) > 1 and not self._is_possible(parts) else self._terminal(" & ".join(parts))

    def _is_possible(self, parts: Sequence[str]) -> bool:
        """Return whether a text fits several expressions at once."""
        expression = " & ".join(parts)
        used = {name: self._written[name] for name in _TERMINAL.findall(expression) if name in self._written}
        return self._fits("\n".join(f"{name}: {each}" for name, each in {"T": expression, **used}.items()))

    def _quoted(self, character: str, repeats: str) -> str:
        """Return an expression for a string of repeated characters."""
        return rf'"\"" {self._terminal(f"/{character}/")}{repeats} "\""'

    def _rule(self, expression: str) -> str:
        return self._named("rule_", expression)

    def _terminal(self, expression: str) -> str:
        return self._named("T", expression)

    def _named(self, kind: str, expression: str) -> str:
        """Return the name of an expression: of a rule in small letters, of a terminal in capitals."""
        if expression not in self._names:
            self._names[expression] = name = f"{kind}{len(self._names)}"
            self._written[name] = expression
        return self._names[expression]


def _is_multiple(schema: Any) -> bool:
    return isinstance(schema, dict) and "multipleOf" in schema


def _multiple(schema: Mapping[str, Any], whitespace: "Whitespace") -> str:
    """Return an expression for a number with ``multipleOf``, which only llguidance's own rules can express."""
    space = _WHITESPACE[whitespace]
    options = {"whitespace_pattern": space} if space else {"whitespace_flexible": False}  # as in the other rules
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _literal(value: Any) -> str:
    """Return an expression for a value without parts."""
    if isinstance(value, str):
        return json_string.literal(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(json.dumps(value))


def _repeats(least: int, most: int | None) -> str:
    return "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"


def _is_terminal(expression: str) -> bool:
    return expression.isidentifier() and expression.isupper()


def _either(ways: Iterable[str]) -> str:
    unlike = list(dict.fromkeys(ways))
    return unlike[0] if len(unlike) == 1 else f"({' | '.join(unlike)})"
