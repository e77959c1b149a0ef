"""Structural tags in the forms that xgrammar reads: text in which tags begin, each with content that is held.

What could not be held to the letter is refused: a lexer takes the longest text that fits, so where a part ends must not
depend on what comes behind it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, StrictBool, TypeAdapter, ValidationError

from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.engines.validation import Section, explain, refuse
from tandemrt.runtime.grammars import patterns
from tandemrt.runtime.grammars.pattern_parts import Unreadable

NUMBER = "0123456789.eE+-"  # what may go on with a number
_ENDS_ITSELF = ("object", "array", "string", "boolean", "null")
Text = Annotated[str, Field(strict=True, min_length=1)]


def _readable(pattern: str) -> str:
    try:
        patterns.full(pattern)
    except Unreadable as reason:
        raise refuse(f"{reason} cannot be enforced; rewrite it without, got {quoted(pattern)}") from None
    return pattern


class Part(Section):
    """A part of the text. Lists of JSON stand for tuples."""

    model_config = ConfigDict(strict=False)


class ConstString(Part):
    type: Literal["const_string"]
    value: Text


class JsonSchema(Part):
    """JSON in one layout."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | StrictBool
    style: Literal["json"] = "json"


class Regex(Part):
    type: Literal["regex"]
    pattern: Annotated[Text, AfterValidator(_readable)]


class AnyText(Part):
    """Text without ``excludes``; in a tag it ends where the tag does first."""

    type: Literal["any_text"]
    excludes: tuple[Text, ...] = ()


class SequenceOf(Part):
    type: Literal["sequence"]
    elements: Annotated[tuple["Format", ...], Field(min_length=1)]


class Or(Part):
    type: Literal["or"]
    elements: Annotated[tuple["Format", ...], Field(min_length=1)]


class Tag(Part):
    """``end``: one of several texts, "" for none."""

    type: Literal["tag"] = "tag"
    begin: Text
    content: "Format"
    end: str | tuple[str, ...]

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts of which one ends it; none if it needs none."""
        found = (self.end,) if isinstance(self.end, str) else self.end
        return () if found == ("",) else found


class TriggeredTags(Part):
    """Free text; where it writes one of ``triggers``, one of the ``tags`` that begin with it follows."""

    type: Literal["triggered_tags"]
    triggers: Annotated[tuple[Text, ...], Field(min_length=1)]
    tags: Annotated[tuple[Tag, ...], Field(min_length=1)]
    at_least_one: StrictBool = False
    stop_after_first: StrictBool = False
    excludes: tuple[Text, ...] = ()


class TagsWithSeparator(Part):
    type: Literal["tags_with_separator"]
    tags: Annotated[tuple[Tag, ...], Field(min_length=1)]
    separator: Text
    at_least_one: StrictBool = False
    stop_after_first: StrictBool = False


Format = Annotated[
    ConstString | JsonSchema | Regex | AnyText | SequenceOf | Or | Tag | TriggeredTags | TagsWithSeparator,
    Discriminator("type"),
]
for _part in (SequenceOf, Or, Tag, TriggeredTags, TagsWithSeparator):
    _part.model_rebuild()
_FORMATS: TypeAdapter[Format] = TypeAdapter(Format)
_KINDS = [kind.model_fields["type"].annotation.__args__[0] for kind in Part.__subclasses__()]  # type: ignore[union-attr]


def read(given: Any) -> Format:
    """Read the value of ``structural_tag``, in the new form or the old one. Raises BadRequest."""
    if not isinstance(given, dict) or given.get("type", "structural_tag") != "structural_tag":
        raise _refusal(f"must be an object of type structural_tag, got {quoted(given)}")
    if ("format" in given) == ("structures" in given):
        raise _refusal("must have format, or structures and triggers, and not both")
    known = {"type", "format"} if "format" in given else {"type", "structures", "triggers"}
    if unknown := set(given) - known:
        raise _refusal(f"{quoted(min(unknown))} is no key of it; leave it out")
    try:
        found = _FORMATS.validate_python(given["format"] if "format" in given else _from_structures(given))
    except ValidationError as error:
        lines = explain(error, tags=_KINDS).split("\n")
        raise BadRequest("\n".join(f"structured_outputs.structural_tag: {line}" for line in lines)) from None
    _check(found, ends=())
    return found


def with_schemas(part: Any, change: Callable[[Any], Any]) -> Any:
    """A format as plain values, each JSON schema in it changed."""
    if isinstance(part, Part):
        part = part.model_dump()
    if isinstance(part, list | tuple):
        return [with_schemas(each, change) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema":
        return part | {"json_schema": change(part["json_schema"])}
    return {name: with_schemas(value, change) for name, value in part.items()}


def _from_structures(given: dict[str, Any]) -> dict[str, Any]:
    structures = given["structures"]
    if not isinstance(structures, list | tuple) or not all(isinstance(each, dict) for each in structures):
        raise _refusal(f"structures must be a list of objects with begin, schema and end, got {quoted(structures)}")
    tags = [
        {**each, "content": {"type": "json_schema", "json_schema": each.get("schema")}, "schema": None}
        for each in structures
    ]
    for tag in tags:
        del tag["schema"]
    return {"type": "triggered_tags", "triggers": given.get("triggers", ()), "tags": tags}


def _check(part: Part, ends: Sequence[str]) -> None:
    """Raise BadRequest where the end of a part would depend on what follows; ``ends``: the texts that follow ``part``
    as the content of a tag."""
    match part:
        case SequenceOf(elements=elements):
            for before, behind in pairwise(elements):
                _check_followed(before, _begins(behind))
            for element in elements[:-1]:
                _check(element, ())
            _check(elements[-1], ends)
        case Or(elements=elements):
            if any(_begins(element) is None for element in elements):
                raise _refusal("each element of or must begin with a text of its own, a const_string or a tag")
            _check_apart([begin for element in elements for begin in _begins(element) or ()])
            for element in elements:
                _check(element, ends)
        case Tag(content=content):
            if _ends_with(content) == "tags":
                raise _refusal(f"tags must not stand at the end of a tag ({quoted(part.begin)}); let them stand last")
            if "" in part.ends:
                raise _refusal(f"end must not be empty beside others, got {quoted(part.end)}")
            if part.ends and _ends_with(content) == "number":
                _check_followed(content, part.ends)
            _check(content, part.ends)
        case TriggeredTags(tags=tags) | TagsWithSeparator(tags=tags):
            _check_apart([tag.begin for tag in tags])
            separators = (part.separator,) if isinstance(part, TagsWithSeparator) else None
            for tag in tags:
                _check_followed(tag, separators)
                _check(tag, ())
            if isinstance(part, TriggeredTags):
                _check_triggers(part)


def _check_triggers(part: TriggeredTags) -> None:
    for tag in part.tags:
        if not tag.begin.startswith(part.triggers):
            raise _refusal(f"the begin of a tag must begin with a trigger, got {quoted(tag.begin)}")
    for trigger in part.triggers:
        if held := next((each for each in part.triggers if each in trigger[1:]), None):
            raise _refusal(f"a trigger must not hold another one, got {quoted(trigger)} with {quoted(held)} in it")


def _check_followed(part: Part, begins: Iterable[str] | None) -> None:
    end = _ends_with(part)
    if end in ("open", "tags"):
        raise _refusal("any_text, regex and tags must stand last, or any_text and regex in a tag with an end")
    if end == "number" and (begins is None or any(begin[0] in NUMBER for begin in begins)):
        raise _refusal(f"what follows a number must not go on with one ({NUMBER}); give the schema a type or an end")


def _check_apart(begins: Sequence[str]) -> None:
    for begin, longer in pairwise(sorted(set(begins))):
        if longer.startswith(begin):
            raise _refusal(
                f"no begin may be the beginning of another one, got {quoted(begin)} and {quoted(longer)}; close the "
                "shorter one with a quote or a bracket"
            )


def _begins(part: Part) -> list[str] | None:
    """The texts of which ``part`` begins with one; None if there is more to it."""
    match part:
        case ConstString(value=value):
            return [value]
        case Tag(begin=begin):
            return [begin]
        case SequenceOf(elements=elements):
            return _begins(elements[0])
        case Or(elements=elements):
            return [begin for element in elements for begin in _begins(element) or ()]
    return None


def _ends_with(part: Part) -> Literal["text", "number", "open", "tags"]:
    """What it ends with: a text that ends by itself, a number, which may go on, free text, or tags that may go on."""
    match part:
        case JsonSchema(json_schema=schema):
            ends = isinstance(schema, dict) and schema.get("type") in _ENDS_ITSELF
            return "text" if ends else "number"
        case Regex() | AnyText():
            return "open"
        case TriggeredTags() | TagsWithSeparator():
            return "tags"
        case SequenceOf(elements=elements):
            return _ends_with(elements[-1])
        case Or(elements=elements):
            return max(map(_ends_with, elements), key=["text", "number", "open", "tags"].index)
        case Tag():
            return "text" if part.ends else _ends_with(part.content)
    return "text"


def tags_of(part: TriggeredTags) -> Iterator[tuple[str, list[Tag]]]:
    """The tags by the trigger that is complete first in their begin."""
    first = {tag.begin: min(filter(tag.begin.startswith, part.triggers), key=len) for tag in part.tags}
    for trigger in dict.fromkeys(first.values()):
        yield trigger, [tag for tag in part.tags if first[tag.begin] == trigger]


def _refusal(text: str) -> BadRequest:
    return BadRequest(f"structured_outputs.structural_tag: {text}")
