"""Write the llguidance (Lark) grammar of a structural tag.

A control token has no text. If the begin or end of a tag contains the name of a control token, the grammar allows the
token as an alternative to the name.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tandemrt.runtime.grammars.notation import NOTATIONS
from tandemrt.runtime.grammars.notation_grammar import NotationGrammar
from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.structural_tag import (
    AnyText,
    ConstString,
    Format,
    JsonSchema,
    OptionalTag,
    Or,
    Regex,
    SequenceOf,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
    tags_of,
)

_ANY = r"(.|\n)"


class TagGrammar:
    """Writes one grammar.

    Args:
        control: ids of control tokens by name.
        schema_rule: returns the rule of a JSON schema.
    """

    def __init__(self, control: Mapping[str, int], schema_rule: Callable[[Any], str]) -> None:
        self._control = control
        self._schema_rule = schema_rule
        self._definitions: dict[str, str] = {}
        self.lexemes: list[str] = []  # definitions to check: each must match at least one text

    def write(self, part: Format) -> str:
        """Return the rules. Raises ValueError for a trigger that has a control token, but not at its beginning."""
        start = self._part(part, ())
        return "\n".join([f"start: {start}", *(f"{name}: {each}" for name, each in self._definitions.items())])

    def _part(self, part: Format, ends: Sequence[str]) -> str:
        """Return an expression for ``part``, followed by one of ``ends`` if it is the content of a tag."""
        match part:
            case AnyText(excludes=excludes):
                return self.free(f"/{_ANY}*/", excludes, ends)
            case Regex(pattern=pattern):
                return self.free(f"/{patterns.fullmatch_expression(pattern)}/", (), ends)
            case SequenceOf(elements=elements):
                return " ".join([*(self._part(each, ()) for each in elements[:-1]), self._part(elements[-1], ends)])
            case Or(elements=elements):
                return _either(self._part(each, ends) for each in elements)
            case ConstString(value=value):
                return self._then(self.text(value), ends)
            case JsonSchema(json_schema=schema) if part.style != "json":
                return self._then(NotationGrammar(self, NOTATIONS[part.style], self._schema_rule).write(schema), ends)
            case JsonSchema(json_schema=schema):
                return self._then(self.named("rule", self._schema_rule(schema)), ends)
            case Tag(begin=begin):
                return self._then(f"{self.text(begin)} {self._rest(part)}", ends)
            case OptionalTag(content=content):
                return self._then(f"({self._part(content, ())})?", ends)
            case TriggeredTags():
                return self._triggered(part)
            case TagsWithSeparator(tags=tags):
                tag = _either(self._part(tag, ()) for tag in tags)
                several = tag if part.stop_after_first else f"{tag} ({self.text(part.separator)} {tag})*"
                return several if part.at_least_one else f"({several})?"

    def _rest(self, tag: Tag) -> str:
        """Return an expression for ``tag`` after its begin."""
        if not (tag.followed_by and isinstance(tag.content, AnyText)):
            return self._part(tag.content, tag.ends)
        # Each end is a lexeme, so that the next lexeme decides: the following part, or more text with another end.
        excludes = tag.content.excludes
        first = self.free(f"/{_ANY}*/", excludes, tag.ends)
        more = self.free(f"/{_ANY}*/", excludes, tag.ends, not_first=[*tag.followed_by, *tag.overlaps])
        return f"{first} {_either([more, *map(self.text, tag.overlaps)])}*"

    def _triggered(self, part: TriggeredTags) -> str:
        free = self.named("FREE", f"/{_ANY}+/ & {_without([*part.triggers, *part.excludes])}")
        tagged = []
        for trigger, tags in tags_of(part):
            rests = [tag.begin[len(trigger) :] for tag in tags]
            body = self.named(
                "rule",
                _either(f"{self.text(rest)} {self._rest(tag)}" for rest, tag in zip(rests, tags, strict=True)),
            )
            others = [each for each in part.triggers if each != trigger]
            head = f"{_first([trigger])}{_and_without([*others, *part.excludes])}"
            tagged.append(f"{self.named('HEAD', head)} {body}")
            control, *rest = split_controls(trigger, self._control)
            if isinstance(control, int):
                tagged.append(f"{free}? {_token(control)} {self._with_tokens(rest)} {body}")
            elif rest:
                raise ValueError(f"a control token must be the beginning of a trigger, got {trigger!r}")
        tag = f"({' | '.join(tagged)})"
        match part.at_least_one, part.stop_after_first:
            case True, True:
                return tag
            case False, True:
                return f"({tag} | {free})?"
            case True, False:
                return f"{tag}+ {free}?"
        return f"{tag}* {free}?"

    def free(self, expression: str, excludes: Sequence[str], ends: Sequence[str], not_first: Sequence[str] = ()) -> str:
        """Return an expression for text up to the first of ``ends``, or of any length if there are none.

        It contains none of ``excludes`` and begins with none of ``not_first``.
        """
        without = _and_without(excludes) + (f" & ~/{_one_of(not_first)}{_ANY}*/" if not_first else "")
        if not ends:
            return self.named("TEXT", f"{expression}{without}")
        one = _one_of(ends)
        closed = f"/({expression[1:-1]}){one}/ & ~/{_ANY}*{one}{_ANY}+/{without}"
        ways = [self.named("TEXT", closed)]
        for end in ends:
            before, tokens = split_at_token(end, self._control)
            if tokens:
                text = f"/({expression[1:-1]}){patterns.literal(before)}/ & {_without(ends)}{without}"
                ways.append(f"{self.named('TEXT', text)} {self._with_tokens(tokens)}")
        return _either(ways)

    def _then(self, expression: str, ends: Sequence[str]) -> str:
        return f"{expression} {_either(map(self.text, ends))}" if ends else expression

    def text(self, text: str) -> str:
        """Return an expression for ``text``, as text or with its control tokens."""
        parts = split_controls(text, self._control)
        plain = _quoted(text)
        return plain if all(isinstance(part, str) for part in parts) else _either([plain, self._with_tokens(parts)])

    def _with_tokens(self, parts: Iterable[str | int]) -> str:
        return " ".join(_quoted(part) if isinstance(part, str) else _token(part) for part in parts)

    def named(self, kind: str, expression: str) -> str:
        """Add a definition, and return its new name: a lexeme if ``kind`` is in capitals, else a rule."""
        name = f"{kind}_{len(self._definitions)}" if kind.islower() else f"{kind}{len(self._definitions)}"
        self._definitions[name] = expression
        if kind in ("HEAD", "TEXT"):
            self.lexemes.append(f"{name}: {expression}")
        return name

    def define(self, name: str, expression: str) -> None:
        """Replace the expression of a definition."""
        self._definitions[name] = expression


def split_controls(text: str, control: Mapping[str, int]) -> list[str | int]:
    """Split ``text`` into the ids of control tokens and the texts between them. ``control``: ids by name."""
    if not control:
        return [text]
    names = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))  # the longest of those at one place
    return [control.get(part, part) for part in re.split(f"({names})", text) if part] or [text]


def split_at_token(text: str, control: Mapping[str, int]) -> tuple[str, list[str | int]]:
    """Split ``text`` into the text before its first control token, and that token with what follows."""
    first, *others = split_controls(text, control)
    return ("", [first, *others]) if isinstance(first, int) else (first, others)


def _first(words: Sequence[str]) -> str:
    """Return an expression for text up to the end of the first occurrence of one of ``words``."""
    one = _one_of(words)
    return f"/{_ANY}*{one}/ & ~/{_ANY}*{one}{_ANY}+/"


def _without(words: Iterable[str]) -> str:
    return f"~/{_ANY}*{_one_of(words)}{_ANY}*/"


def _one_of(words: Iterable[str]) -> str:
    return f"({'|'.join(map(patterns.literal, words))})"


def _and_without(words: Sequence[str]) -> str:
    return f" & {_without(words)}" if words else ""


def _either(ways: Iterable[str]) -> str:
    alternatives = list(ways)
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


def _token(token: int) -> str:
    return f"<[{token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
