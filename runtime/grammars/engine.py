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
}


def engine_of(asked: StructuredOutputs) -> Engine:
    """The engine of a structured output. Raises BadRequest where the one it names does not hold its kind."""
    kinds = {"json": asked.json_schema, "json_object": asked.json_object, "regex": asked.regex, "choice": asked.choice}
    kind = next((kind for kind, value in kinds.items() if value is not None), "grammar")
    if asked.engine is None:
        return ENGINES[kind][0]
    if asked.engine not in ENGINES[kind]:
        raise BadRequest(
            f"structured_outputs.engine: {kind} is held by {' or '.join(ENGINES[kind])}, got {quoted(asked.engine)}; "
            "leave it out"
        )
    return asked.engine
