"""What was read of structured outputs is kept, so that a schema that many requests share is worked out once."""

import marshal
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

from tandemrt.engines.params import StructuredOutputs
from tandemrt.runtime.grammars.output import OutputCheck

if TYPE_CHECKING:
    from tandemrt.runtime.grammars.structured import Source

MOST_READINGS = 256
LARGEST_KEPT = 1 << 18  # bytes of a schema as it was asked for

Reading = tuple["Source", OutputCheck | None]


class Readings:
    """Reads structured outputs, those with a schema from memory where it can; the least recently used leave first."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Reading] = OrderedDict()
        self._lock = Lock()

    def read(self, structured: StructuredOutputs) -> Reading:
        """As ``structured.read``. Raises BadRequest; no refusal is remembered."""
        key = _key(structured)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        from tandemrt.runtime.grammars import structured as reader  # with jsonschema: free text needs none

        reading = reader.read(structured)
        if 0 < len(key) <= LARGEST_KEPT:
            with self._lock:
                self._known[key] = reading
                if len(self._known) > MOST_READINGS:
                    self._known.popitem(last=False)
        return reading


def _key(structured: StructuredOutputs) -> bytes:
    """The very value that was asked for, order included; nothing for what is quick to read. Raises BadRequest."""
    given = structured.json_schema
    if given is None:
        return b""
    from tandemrt.runtime.grammars.structured import schema_of

    # A copy is a tree: a value that holds another one twice, or itself, would be spelled without an end.
    value = given if isinstance(given, str) else schema_of(given)
    return marshal.dumps((value, structured.disable_any_whitespace, structured.validate_output, structured.engine), 2)
