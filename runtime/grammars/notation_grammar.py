"""Write the llguidance (Lark) rules of a JSON schema for values in another notation (notation.py).

The schema comes from ``schema.emit``, so it has few keywords. Those that only JSON's rules enforce are rejected.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tandemrt.engines.validation.errors import quoted
from tandemrt.runtime.grammars.notation import Notation, ObjectForm
from tandemrt.runtime.grammars.regex import patterns

_NAME = "[A-Za-z_][A-Za-z0-9_.-]*"  # of a property, where names are not strings
_SINGLE_QUOTED = r"'([^'\\\x00-\x1f]|\\([\\'\"bfnrt]|u[0-9a-fA-F]{4}))*'"
_SIMPLE_NAME = r"""("[^"'\\\x00-\x1f]*"|'[^"'\\\x00-\x1f]*')"""  # where names are strings
_ANY_VALUE: dict[str, Any] = {
    "anyOf": [{"type": kind} for kind in ("string", "number", "boolean", "null", "array", "object")]
}


class Rules(Protocol):
    """The rules of one grammar."""

    def text(self, text: str) -> str:
        """Return an expression for ``text``, as text or with its control tokens."""

    def free(self, expression: str, excludes: Sequence[str], ends: Sequence[str]) -> str:
        """Return an expression for text that matches ``expression``, up to the first of ``ends``."""

    def named(self, kind: str, expression: str) -> str:
        """Add a definition, and return its new name."""

    def define(self, name: str, expression: str) -> None:
        """Replace the expression of a definition."""


class NotationGrammar:
    """Writes the rules of one schema.

    ``json_rule`` returns the rule of a schema in JSON, for values that both notations write alike.
    """

    def __init__(self, rules: Rules, notation: Notation, json_rule: Callable[[Any], str]) -> None:
        self._rules = rules
        self._notation = notation
        self._json_rule = json_rule
        self._definitions: Mapping[str, Any] = {}
        self._names: dict[str, str] = {}  # rules of definitions and of any value, by reference
        self._comma = self._separator(",")

    def write(self, schema: Any) -> str:
        """Return an expression for a value that obeys ``schema``. Raises ValueError for unsupported keywords."""
        self._definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        return self._value(schema, outer=True)

    def _value(self, schema: Any, *, outer: bool = False) -> str:
        match schema:
            case False:
                raise ValueError("a value that is never valid cannot be written in this notation")
            case {"$ref": str(target)}:
                return self._shared(target, self._definitions[target.rpartition("/")[2]])
            case {"anyOf": [*ways]}:
                return _either(self._value(each, outer=outer) for each in ways)
            case {"enum": [*values]}:
                return _either(self._literal(each, outer) for each in values)
            case {"type": "string"}:
                return self._string(schema)
            case {"type": "integer" | "number"}:
                return self._rules.named("rule", self._json_rule(schema))
            case {"type": "boolean"}:
                return self._words(True, False)
            case {"type": "null"}:
                return self._words(None)
            case {"type": "array"}:
                return self._array(schema)
            case {"type": "object"}:
                return self._object(schema, self._notation.outer if outer else self._notation.objects)
        return self._object({}, self._notation.outer) if outer else self._shared("", _ANY_VALUE)

    def _shared(self, reference: str, schema: Any) -> str:
        """Return the name of a rule that may contain itself."""
        if reference not in self._names:
            self._names[reference] = self._rules.named("rule", "")
            self._rules.define(self._names[reference], self._value(schema))
        return self._names[reference]

    def _words(self, *values: Any) -> str:
        return _either(_quoted(word) for value in values for word in self._notation.words[value])

    def _literal(self, value: Any, outer: bool = False) -> str:
        if value is None or isinstance(value, bool):
            return self._words(value)
        usual = self._notation.spelled(value, outer=outer)
        if not self._notation.escapes or not isinstance(value, str):
            if isinstance(value, str) and self._notation.quotes[0] in value:
                raise ValueError(f"a text in an enum must not contain {self._notation.quotes[0]}")
            return self._rules.text(usual)
        quotable = usual[1:-1] == value and "'" not in value
        return _either([_quoted(usual), *([_quoted(f"'{value}'")] if quotable else [])])

    def _string(self, schema: Mapping[str, Any]) -> str:
        limits = {key: value for key, value in schema.items() if key != "type"}
        if self._notation.escapes:
            double = self._rules.named("rule", self._json_rule(schema))
            if limits:
                return double
            return f"({double} | /{_SINGLE_QUOTED}/)"
        match limits:
            case {"pattern": str(pattern), **others} if not others:
                expression = f"/{patterns.fullmatch_expression(pattern)}/"
            case {"minLength": int(), **others} | {"maxLength": int(), **others} if not (
                set(others) - {"minLength", "maxLength"}
            ):
                expression = f"/(.|\\n){{{limits.get('minLength', 0)},{limits.get('maxLength', '')}}}/"
            case _ if not limits:
                expression = r"/(.|\n)*/"
            case _:
                raise ValueError(f"a text with {', '.join(limits)} together cannot be enforced without escapes")
        [quote] = self._notation.quotes
        return f"{self._rules.text(quote)} {self._rules.free(expression, (), (quote,))}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        more = "" if rest is False else self._repeated(rest, len(first), least, most)
        for at in range(len(first) - 1, -1, -1):
            if most is None or at < most:
                item = f"{self._comma if at else ''} {self._value(first[at])} {more}"
                more = item if at < least else f"({item})?"
        return f'"[" {more} "]"'

    def _repeated(self, item: Any, before: int, least: int, most: int | None) -> str:
        """Return an expression for the items after the first ``before`` ones."""
        if most is not None and most <= before:
            return ""
        least, most = max(0, least - before), None if most is None else most - before
        one = self._rules.named("rule", self._value(item))
        if before:
            return f"({self._comma} {one}){{{least},{'' if most is None else most}}}"
        more = f"({self._comma} {one}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        return f"{one} {more}" if least else f"({one} {more})?"

    def _object(self, schema: Mapping[str, Any], form: ObjectForm) -> str:
        if other := next((key for key in ("minProperties", "maxProperties") if key in schema), None):
            raise ValueError(f"{other} cannot be enforced in this notation")
        required, named = schema.get("required", ()), schema.get("patternProperties", {})
        rest = schema.get("additionalProperties", True)
        properties = self._notation.ordered(schema.get("properties", {}))
        none_yet, after_one = "", ""
        listed = [patterns.literal(name) for name, _ in properties]
        matched = [pattern[1:-1] for pattern in named]  # they are written as ^...$
        pairs = [
            f"{self._other_name(pattern, listed if pattern else [*listed, *matched], form)} {self._value(value)}"
            for pattern, value in [*zip(matched, named.values(), strict=True), (None, rest)]
            if value is not False
        ]
        if pairs:
            pair = self._rules.named("rule", _either(pairs))
            none_yet, after_one = f"({pair} ({self._comma} {pair})*)?", f"({self._comma} {pair})*"
        for name, value in reversed(properties):
            if value is False:
                continue
            pair = self._rules.named("rule", f"{self._name(name, form)} {self._value(value)}")
            more = self._rules.named("rule", after_one) if after_one else ""
            if name in required:
                none_yet, after_one = f"{pair} {more}", f"{self._comma} {pair} {more}"
            else:
                none_yet = f"({pair} {more} | {none_yet})" if none_yet else f"({pair} {more})?"
                none_yet, after_one = self._rules.named("rule", none_yet), f"({self._comma} {pair})? {more}"
        return " ".join(part for part in (_quoted(form.begin), none_yet, _quoted(form.end)) if part) or '""'

    def _name(self, name: str, form: ObjectForm) -> str:
        if form.quoted_names:
            return f"{self._literal(name)} {self._separator(form.after_name)}"
        if not re.fullmatch(_NAME, name):
            raise ValueError(f"the property name {quoted(name)} must consist of letters, digits, _, . and -")
        return _quoted(name + form.after_name)

    def _other_name(self, pattern: str | None, excluded: Iterable[str], form: ObjectForm) -> str:
        """Return a name up to its value. It matches ``pattern``, if given, and none of the expressions ``excluded``."""
        parts = [
            f"/{_SIMPLE_NAME if form.quoted_names else _NAME}/",
            *([f"/{_in_quotes(pattern, form)}/"] if pattern else []),
            *(f"~/{_in_quotes(each, form)}/" for each in excluded),
        ]
        return f"{self._rules.named('NAME', ' & '.join(parts))} {self._separator(form.after_name)}"

    def _separator(self, mark: str) -> str:
        """Return an expression for a comma, or for the text after a name."""
        return f"/{mark} ?/" if self._notation.space and mark != "=" else _quoted(mark)


def _in_quotes(expression: str, form: ObjectForm) -> str:
    """Return an expression for a name in double or single quotes, or in none."""
    return f"\"({expression})\"|'({expression})'" if form.quoted_names else f"({expression})"


def _either(ways: Iterable[str]) -> str:
    alternatives = list(ways)
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
