"""Structural tags in xgrammar's two formats: free text, with tags whose content is constrained.

A structural tag that llguidance cannot enforce exactly is rejected. Its lexer takes the longest match, so the end of a
part must not depend on the text that follows.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.engines.validation.records import Section, explain, reject
from tandemrt.runtime.grammars.notation import Style
from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.regex.syntax import UnsupportedPattern

NUMBER = "0123456789.eE+-"  # characters that may continue a number
_FIRST_CHARACTERS = {  # of a JSON value, by its type
    "object": "{",
    "array": "[",
    "string": '"',
    "boolean": "tf",
    "null": "n",
    "number": "-0123456789",
    "integer": "-0123456789",
}
MAX_FOLLOWED_END = 256  # characters of an end with followed_by; each place where it overlaps itself becomes a rule
MAX_TRIGGERS = 256  # each excludes the others, so compiling takes time with their square
MAX_PARTS = 1024  # of one sequence
_SELF_DELIMITING = frozenset({"object", "array", "string", "boolean", "null"})
Text = Annotated[str, Field(strict=True, min_length=1)]


def _supported_pattern(pattern: str) -> str:
    try:
        patterns.fullmatch_expression(pattern)
    except UnsupportedPattern as reason:
        raise reject(f"{reason} cannot be enforced; rewrite the pattern without it, got {quoted(pattern)}") from None
    return pattern


class Part(Section):
    """Base class of the formats. JSON lists are accepted as tuples."""

    model_config = ConfigDict(strict=False)


class ConstString(Part):
    type: Literal["const_string"]
    value: Text


class JsonSchema(Part):
    """A JSON value, or the same value in another notation (``style``, notation.py)."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | StrictBool
    style: Style = "json"


class Regex(Part):
    type: Literal["regex"]
    pattern: Annotated[Text, AfterValidator(_supported_pattern)]


class AnyText(Part):
    """Any text that contains none of ``excludes``; inside a tag, it stops at the first ``end`` of the tag."""

    type: Literal["any_text"]
    excludes: tuple[Text, ...] = ()


class SequenceOf(Part):
    type: Literal["sequence"]
    elements: Annotated[tuple["Format", ...], Field(min_length=1, max_length=MAX_PARTS)]


class Or(Part):
    type: Literal["or"]
    elements: Annotated[tuple["Format", ...], Field(min_length=1)]


class Tag(Part):
    """``begin`` may be ""; ``end`` is one text or several alternatives, "" for none.

    With ``followed_by``, the text in the tag goes on after an ``end`` that none of these texts follows. They are not
    part of the tag.
    """

    type: Literal["tag"] = "tag"
    begin: Annotated[str, Field(strict=True)]
    content: "Format"
    end: str | tuple[str, ...]
    followed_by: tuple[Text, ...] = ()

    @property
    def ends(self) -> tuple[str, ...]:
        """The alternative end texts; empty if the tag has no end."""
        ends = (self.end,) if isinstance(self.end, str) else self.end
        return () if ends == ("",) else ends

    @property
    def overlaps(self) -> list[str]:
        """The texts after an end that complete a second one that begins inside the first: "ab" after "bab"."""
        return [end[size:] for end in self.ends for size in range(1, len(end)) if end.endswith(end[:size])]

    @model_validator(mode="after")
    def _goes_on_as_free_text(self) -> "Tag":
        if not self.followed_by:
            return self
        if not (isinstance(self.content, AnyText) and len(self.ends) == 1):
            raise reject(
                f"content must be any_text with one end where followed_by is given, got the end {quoted(self.end)}"
            )
        if len(self.ends[0]) > MAX_FOLLOWED_END:
            raise reject(
                f"an end must have at most {MAX_FOLLOWED_END} characters where followed_by is given, got "
                f"{len(self.ends[0])}; shorten it"
            )
        for word, rest in product(self.followed_by, self.overlaps):
            if word.startswith(rest) or rest.startswith(word):
                raise reject(f"a text of followed_by must not begin inside the end, got {quoted(word)}")
        return self


class OptionalTag(Part):
    """A tag with an end, or nothing."""

    type: Literal["optional"]
    content: Tag

    @field_validator("content")
    @classmethod
    def _closed(cls, tag: Tag) -> Tag:
        if not tag.ends or not tag.begin:
            raise reject(f"an optional tag must have a begin and an end, got {quoted(tag.begin)} and {quoted(tag.end)}")
        return tag


class TriggeredTags(Part):
    """Free text; after one of ``triggers``, one of the ``tags`` that begin with it must follow."""

    type: Literal["triggered_tags"]
    triggers: Annotated[tuple[Text, ...], Field(min_length=1, max_length=MAX_TRIGGERS)]
    tags: Annotated[tuple[Tag, ...], Field(min_length=1)]
    at_least_one: StrictBool = False
    stop_after_first: StrictBool = False
    excludes: tuple[Text, ...] = ()


class TagsWithSeparator(Part):
    type: Literal["tags_with_separator"]
    tags: Annotated[tuple[Tag, ...], Field(min_length=1)]
    separator: Annotated[str, Field(strict=True)]
    at_least_one: StrictBool = False
    stop_after_first: StrictBool = False


Format = Annotated[
    ConstString
    | JsonSchema
    | Regex
    | AnyText
    | SequenceOf
    | Or
    | Tag
    | OptionalTag
    | TriggeredTags
    | TagsWithSeparator,
    Discriminator("type"),
]
for _part in (SequenceOf, Or, Tag, OptionalTag, TriggeredTags, TagsWithSeparator):
    _part.model_rebuild()
_FORMATS: TypeAdapter[Format] = TypeAdapter(Format)
_KINDS = [kind.model_fields["type"].annotation.__args__[0] for kind in Part.__subclasses__()]  # type: ignore[union-attr]


def read(tag: Any) -> Format:
    """Parse a ``structural_tag``: the new format (``format``) or the old one (``structures``). Raises BadRequest."""
    if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
        raise _error(f"must be an object of type structural_tag, got {quoted(tag)}")
    if ("format" in tag) == ("structures" in tag):
        raise _error("must have format, or structures and triggers, and not both")
    known = {"type", "format"} if "format" in tag else {"type", "structures", "triggers"}
    if unknown := set(tag) - known:
        raise _error(f"{quoted(min(unknown))} is not a known key; leave it out")
    tag_format = parse(tag["format"] if "format" in tag else _from_structures(tag))
    _check(tag_format, ends=())
    _check_goes_on(tag_format, None)
    return tag_format


def parse(tag_format: Any) -> Format:
    """Parse a format whose parts need no further checks, because they were checked together before."""
    try:
        return _FORMATS.validate_python(tag_format)
    except ValidationError as error:
        lines = explain(error, tags=_KINDS).split("\n")
        raise BadRequest("\n".join(f"structured_outputs.structural_tag: {line}" for line in lines)) from None


def with_schemas(part: Any, change: Callable[[Any], Any]) -> Any:
    """Return a format as plain JSON values, with ``change`` applied to each JSON schema in it."""
    if isinstance(part, Part):
        part = part.model_dump()
    if isinstance(part, list | tuple):
        return [with_schemas(each, change) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema":
        return part | {"json_schema": change(part["json_schema"])}
    return {name: with_schemas(value, change) for name, value in part.items()}


def styles(part: Any) -> Iterator[Style]:
    """Yield the notation of each JSON schema in a format."""
    if isinstance(part, Part):
        part = part.model_dump()
    if isinstance(part, list | tuple):
        for each in part:
            yield from styles(each)
    elif isinstance(part, dict):
        if part.get("type") == "json_schema":
            yield part["style"]
        yield from styles([value for name, value in part.items() if name != "json_schema"])


def _from_structures(legacy_tag: dict[str, Any]) -> dict[str, Any]:
    structures = legacy_tag["structures"]
    if not isinstance(structures, list | tuple) or not all(isinstance(each, dict) for each in structures):
        raise _error(f"structures must be a list of objects with begin, schema and end, got {quoted(structures)}")
    tags = [
        {**each, "content": {"type": "json_schema", "json_schema": each.get("schema")}, "schema": None}
        for each in structures
    ]
    for tag in tags:
        del tag["schema"]
    return {"type": "triggered_tags", "triggers": legacy_tag.get("triggers", ()), "tags": tags}


def _check(part: Part, ends: Sequence[str]) -> None:
    """Raise BadRequest if the end of a part would depend on the text that follows it.

    ``ends``: the alternative ends of the tag whose content ``part`` is; empty if there is none.
    """
    match part:
        case SequenceOf(elements=elements):
            for before, after in pairwise(elements):
                _check_followed(before, _begins(after))
            for element in elements[:-1]:
                _check(element, ())
            _check(elements[-1], ends)
        case Or(elements=elements):
            if any(_begins(element) is None for element in elements):
                raise _error("each element of an or must begin with a fixed text: a const_string, a tag or JSON")
            _check_apart([begin for element in elements for begin in _begins(element) or ()])
            for element in elements:
                _check(element, ends)
        case Tag(content=content):
            if _ends_with(content) == "tags":
                raise _error(
                    f"tags must not be the last part of a tag ({quoted(part.begin)}); put them at the end of the format"
                )
            if "" in part.ends:
                raise _error(f"end must not contain an empty text, got {quoted(part.end)}; remove it")
            if part.ends and _ends_with(content) == "number":
                _check_followed(content, part.ends)
            _check(content, part.ends)
        case OptionalTag(content=content):
            _check(content, ())
        case TriggeredTags(tags=tags) | TagsWithSeparator(tags=tags):
            _check_apart([begin for tag in tags for begin in _begins(tag) or (tag.begin,)])
            separators = (part.separator,) if isinstance(part, TagsWithSeparator) else None
            for tag in tags:
                _check_followed(tag, separators)
                _check(tag, ())
            if isinstance(part, TriggeredTags):
                _check_triggers(part)


def _check_triggers(part: TriggeredTags) -> None:
    for tag in part.tags:
        if not tag.begin.startswith(part.triggers):
            raise _error(f"the begin of a tag must begin with a trigger, got {quoted(tag.begin)}")
    for trigger in part.triggers:
        rest = trigger[1:]
        if inner := next((other for other in part.triggers if other in rest), None):
            raise _error(f"a trigger must not contain another one, got {quoted(trigger)} with {quoted(inner)} in it")


def _check_followed(part: Part, begins: Sequence[str] | None) -> None:
    if isinstance(part, TagsWithSeparator) and part.at_least_one and begins is not None:
        if any(begin.startswith(part.separator) or part.separator.startswith(begin) for begin in begins):
            raise _error(f"the text after tags must differ from their separator, got {quoted(part.separator)} for both")
        for tag in part.tags:
            _check_followed(tag, begins)
        return
    end = _ends_with(part)
    if end in ("open", "tags"):
        raise _error("any_text, regex and tags must come last; any_text and regex may also be in a tag with an end")
    if end == "number" and (begins is None or any(begin[:1] in NUMBER for begin in begins)):
        raise _error(f"text after a number must not begin with one of {NUMBER}; give the schema a type or an end")


def _check_goes_on(part: Part, following: Sequence[str] | None) -> None:
    """Raise BadRequest if a tag with ``followed_by`` may come before another text.

    ``following``: the alternative texts that come after ``part``; None: any.
    """
    match part:
        case Tag(content=content, followed_by=words):
            if words and (following is None or not all(text.startswith(words) for text in following)):
                raise _error(f"the text after a tag must begin with one of its followed_by, got {quoted(following)}")
            _check_goes_on(content, part.ends or following)
        case OptionalTag(content=content):
            _check_goes_on(content, following)
        case SequenceOf(elements=elements):
            for element in reversed(elements):
                _check_goes_on(element, following)
                following = _followed_begins(element, following)
        case Or(elements=elements):
            for element in elements:
                _check_goes_on(element, following)
        case TriggeredTags(tags=tags):
            for tag in tags:
                _check_goes_on(tag, None)
        case TagsWithSeparator(tags=tags, separator=separator):
            for tag in tags:
                _check_goes_on(tag, None if following is None else [separator, *following])


def _followed_begins(part: Part, following: Sequence[str] | None) -> Sequence[str] | None:
    """Return the texts that ``part``, with ``following`` after it, may begin with, or None if any."""
    if not isinstance(part, OptionalTag):
        return _begins(part)
    begins = _begins(part.content)
    return None if begins is None or following is None else [*begins, *following]


def _check_apart(begins: Sequence[str]) -> None:
    for begin, longer in pairwise(sorted(set(begins))):
        if longer.startswith(begin):
            raise _error(
                f"no begin may be a prefix of another one, got {quoted(begin)} and {quoted(longer)}; end the "
                "shorter one with a quote or a bracket"
            )


def _begins(part: Part) -> list[str] | None:
    """Return the alternative texts that ``part`` begins with, or None if they are not a fixed list."""
    match part:
        case ConstString(value=value):
            return [value]
        case JsonSchema(style="json", json_schema=schema):
            return list(first_characters(schema))
        case TagsWithSeparator(tags=tags, at_least_one=True):
            return [begin for tag in tags for begin in _begins(tag) or (tag.begin,)]
        case Tag(begin=begin, content=content):
            following = _begins(content) or ([""] if begin else None)
            return None if following is None else [begin + each for each in following]
        case SequenceOf(elements=elements):
            begins: list[str] = []
            for element in elements:
                if not isinstance(element, OptionalTag):
                    following = _begins(element)
                    return None if following is None else [*begins, *following]
                begins += _begins(element.content) or ()
        case Or(elements=elements):
            return [begin for element in elements for begin in _begins(element) or ()]
    return None


def first_characters(schema: Any) -> str:
    """Return the characters that a value of ``schema`` may begin with, or all that a JSON value may."""
    return "".join(dict.fromkeys("".join(_FIRST_CHARACTERS.get(name, "") for name in _types(schema))))


def _types(schema: Any) -> list[str]:
    """Return the types that ``schema``, which may be invalid, names, or all types."""
    types = schema.get("type") if isinstance(schema, dict) else None
    names = types if isinstance(types, list | tuple) else [types]
    return [name for name in names if isinstance(name, str)] or [*_FIRST_CHARACTERS]


def _ends_with(part: Part) -> Literal["text", "number", "open", "tags"]:
    """Classify how ``part`` ends: "text" is definite, "number" may continue, "open" is free text, "tags" may repeat."""
    match part:
        case JsonSchema(json_schema=schema):
            return "text" if _SELF_DELIMITING.issuperset(_types(schema)) else "number"
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
    """Yield each trigger with its tags. A tag belongs to the shortest trigger that its ``begin`` starts with."""
    first = {tag.begin: min(filter(tag.begin.startswith, part.triggers), key=len) for tag in part.tags}
    for trigger in dict.fromkeys(first.values()):
        yield trigger, [tag for tag in part.tags if first[tag.begin] == trigger]


def _error(text: str) -> BadRequest:
    return BadRequest(f"structured_outputs.structural_tag: {text}")
