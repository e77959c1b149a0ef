"""What was read of structured outputs is kept, so that a schema that many requests share is worked out once."""

import marshal
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any

from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.engines.params import StructuredOutputs
from tandemrt.engines.sizes import exceeds
from tandemrt.runtime.grammars.output import OutputCheck

if TYPE_CHECKING:
    from tandemrt.runtime.grammars.structured import Elsewhere, Source

MOST_READINGS = 256
LARGEST_KEPT = 1 << 18  # bytes of a schema as it was asked for
LONGEST_REGEX = 1 << 15

Reading = tuple["Source", OutputCheck | None]


class Readings:
    """Reads structured outputs, those with a schema from memory where it can; the least recently used leave first.

    ``most_bytes``: of what was asked for.
    """

    def __init__(self, most_bytes: int = LARGEST_KEPT) -> None:
        self._most_bytes = most_bytes
        self._known: OrderedDict[bytes, Reading] = OrderedDict()
        self._lock = Lock()

    def read(self, structured: StructuredOutputs, elsewhere: "Elsewhere | None" = None) -> Reading:
        """As ``structured.read``. Raises BadRequest, also for what is too large; no refusal is remembered."""
        key = _key(structured, self._most_bytes)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        from tandemrt.runtime.grammars import structured as reader  # with jsonschema: free text needs none

        reading = reader.read(structured, elsewhere)
        if 0 < len(key) <= LARGEST_KEPT:
            with self._lock:
                self._known[key] = reading
                if len(self._known) > MOST_READINGS:
                    self._known.popitem(last=False)
        return reading


def _key(structured: StructuredOutputs, most: int) -> bytes:
    """The very value that was asked for, order included; nothing for what is quick to read.

    Raises BadRequest for what is no JSON or larger than ``most`` bytes, before anything is done with it.
    """
    given = structured.json_schema
    kinds: dict[str, Any] = {"choice": structured.choice, "regex": structured.regex, "grammar": structured.grammar}
    kind, value = next(((kind, value) for kind, value in kinds.items() if value is not None), ("json", given))
    if not isinstance(value, dict) and exceeds(value, limit := min(most, LONGEST_REGEX) if kind == "regex" else most):
        rule = "" if kind == "regex" else " (max_grammar_bytes)"
        raise BadRequest(
            f"structured_outputs.{kind}: must be at most {limit} bytes{rule}, got more: {quoted(value)}; shorten it"
        )
    if given is None:
        return b""
    from tandemrt.runtime.grammars.structured import schema_of

    # A copy is a tree: a value that holds another one twice, or itself, would be spelled without an end.
    value = given if isinstance(given, str) else schema_of(given, most)
    told = (structured.disable_any_whitespace, structured.disable_additional_properties, structured.validate_output)
    return marshal.dumps((value, told, structured.engine), 2)
