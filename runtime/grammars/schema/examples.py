"""Add a text that fits to the patterns of an emitted schema (emit.py), so that the engine finds one.

llguidance 1.9.1 looks for a text of a string that has a pattern and a length, and rejects the schema if it finds none
in 10,000 steps. An alternative that the pattern allows already ends the search.
"""

from typing import Any

from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.regex.shortest import shortest_text

SEARCH_ENDED = "Unable to determine if regex is empty"  # in llguidance's error


def with_examples(schema: Any) -> Any:
    """Return a schema with the same values, in which the patterns of strings with a length begin with an example."""
    if isinstance(schema, list):
        return [with_examples(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "string":
        return _with_example(schema)
    return {
        key: value if key == "enum" and isinstance(value, list) else with_examples(value)
        for key, value in schema.items()
    }


def _with_example(schema: dict[str, Any]) -> dict[str, Any]:
    if "pattern" not in schema:
        return schema
    own_patterns = [schema["pattern"], *(each["pattern"] for each in schema.get("allOf", ()))]
    written = [each.removeprefix("^").removesuffix("$") for each in own_patterns]
    text = shortest_text(written, schema.get("minLength", 0), schema.get("maxLength"))
    return schema if text is None else {**schema, "pattern": f"^(?:{patterns.literal(text)}|{written[0]})$"}
