"""Warnings about probably misspelled keywords and formats of JSON schemas, which constrain nothing."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.text import formats
from tandemrt.engines.validation.errors import quoted
from tandemrt.engines.validation.records import MOST_LINES
from tandemrt.runtime.grammars.schema.dialect import misspelled
from tandemrt.runtime.grammars.schema.document import escaped, subschemas


def spelling_warnings(structured: StructuredOutputs | None) -> list[str]:
    """Return a line for each probably misspelled keyword or format of a JSON schema, at most ``MOST_LINES``."""
    schema = None if structured is None else structured.json_schema
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return []  # rejected when it is read
    return [f"structured_outputs.json: {line}" for line in islice(_warnings(schema, "#"), MOST_LINES)]


def _warnings(schema: Any, place: str) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    for keyword in schema:
        if meant := misspelled(keyword):
            yield f"{place}/{quoted(keyword)[1:-1]}: is not a keyword and was ignored; did you mean {meant!r}?"
    form = schema.get("format")
    if isinstance(form, str) and (meant := formats.misspelled(form)):
        yield f"{place}/format: {quoted(form)} is not a format and was ignored; did you mean {meant!r}?"
    for path, child in subschemas(schema):
        yield from _warnings(child, "/".join([place, *map(escaped, path)]))
