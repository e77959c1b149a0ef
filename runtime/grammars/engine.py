"""Which grammar engine holds which kind of structured output."""

from typing import Literal

from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.engines.params import StructuredOutputs

Engine = Literal["llguidance", "xgrammar"]

# The engines that hold each kind to the letter; the first is taken unless a request names another.
ENGINES: dict[str, tuple[Engine, ...]] = {
    "json": ("llguidance",),
    "json_object": ("llguidance",),
    "regex": ("llguidance",),
    "choice": ("llguidance", "xgrammar"),
    "grammar": ("xgrammar",),
    "structural_tag": ("llguidance",),
}


def engine_of(asked: StructuredOutputs) -> Engine:
    """The engine of a structured output. Raises BadRequest where the one it names does not hold its kind."""
    kind = asked.kind
    if asked.engine is None:
        return ENGINES[kind][0]
    if asked.engine not in ENGINES[kind]:
        raise BadRequest(
            f"structured_outputs.engine: {kind} is held by {' or '.join(ENGINES[kind])}, got {quoted(asked.engine)}; "
            "leave it out"
        )
    return asked.engine
