"""A cache of converted sources: a schema that many requests share is converted once."""

import marshal
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.engines.validation.sizes import exceeds
from tandemrt.runtime.grammars.output_check import OutputCheck

if TYPE_CHECKING:
    from tandemrt.runtime.grammars.sources import InWorker, Source

MAX_ENTRIES = 256
MAX_ENTRY_BYTES = 1 << 18  # larger schemas are not cached
MAX_REGEX_BYTES = 1 << 15

ReadSource = tuple["Source", OutputCheck | None]


class SourceCache:
    """Convert structured outputs to sources, with an LRU cache of those with a schema.

    ``max_bytes``: larger structured outputs are rejected.
    """

    def __init__(self, max_bytes: int = MAX_ENTRY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, ReadSource] = OrderedDict()
        self._lock = Lock()

    def read(self, structured: StructuredOutputs, in_worker: "InWorker | None" = None) -> ReadSource:
        """Return ``sources.read`` of ``structured``. Raises BadRequest; errors are not cached."""
        key = _key(structured, self._max_bytes)
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        from tandemrt.runtime.grammars import sources as reader  # imports jsonschema, which free text does not need

        reading = reader.read(structured, in_worker, most_bytes=self._max_bytes)
        if 0 < len(key) <= MAX_ENTRY_BYTES:
            with self._lock:
                self._entries[key] = reading
                if len(self._entries) > MAX_ENTRIES:
                    self._entries.popitem(last=False)
        return reading


def _key(structured: StructuredOutputs, most: int) -> bytes:
    """Return a cache key of the value, including the order of its keys; b"" if conversion is fast without a cache.

    Raises BadRequest for a value that is not JSON, or larger than the limit for its kind.
    """
    source = structured.json_schema if structured.structural_tag is None else structured.structural_tag
    kinds: dict[str, Any] = {"choice": structured.choice, "regex": structured.regex, "grammar": structured.grammar}
    schema = "json" if structured.structural_tag is None else "structural_tag"
    kind, value = next(((kind, value) for kind, value in kinds.items() if value is not None), (schema, source))
    if not isinstance(value, dict) and exceeds(value, limit := min(most, MAX_REGEX_BYTES) if kind == "regex" else most):
        rule = "" if kind == "regex" else " (max_grammar_bytes)"
        raise BadRequest(
            f"structured_outputs.{kind}: must be at most {limit} bytes{rule}, got more: {quoted(value)}; shorten it"
        )
    if source is None:
        return b""
    from tandemrt.runtime.grammars.sources import schema_of

    # The copy has no cycles, which marshal cannot write.
    value = source if isinstance(source, str) else schema_of(source, most, kind)
    options = (structured.whitespace, structured.disable_additional_properties, structured.validate_output)
    return marshal.dumps((kind, value, options, structured.engine), 2)
