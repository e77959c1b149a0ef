"""What was read of structured outputs is kept, so that a schema that many requests share is worked out once."""

import marshal
from collections import OrderedDict
from threading import Lock

from tandemrt.engines.params import StructuredOutputs
from tandemrt.runtime.grammars.structured import Check, Source, read

MOST_READINGS = 256
LARGEST_KEPT = 1 << 18  # bytes of a schema as it was asked for

Reading = tuple[Source, Check | None]


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
        reading = read(structured)
        if 0 < len(key) <= LARGEST_KEPT:
            with self._lock:
                self._known[key] = reading
                if len(self._known) > MOST_READINGS:
                    self._known.popitem(last=False)
        return reading


def _key(structured: StructuredOutputs) -> bytes:
    """The very value that was asked for, types and order included; nothing for what is quick to read or no JSON."""
    if structured.json_schema is None:
        return b""
    asked = (structured.json_schema, structured.disable_any_whitespace, structured.validate_output, structured.engine)
    try:
        return marshal.dumps(asked, 2)  # a version without references: what is equal has one spelling
    except ValueError:
        return b""
