"""Choice of the grammar engine for each kind of structured output."""

from typing import Literal

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest, quoted

Engine = Literal["llguidance", "xgrammar"]

# Engines that enforce each kind exactly. The first one is the default.
ENGINES: dict[str, tuple[Engine, ...]] = {
    "json": ("llguidance",),
    "json_object": ("llguidance",),
    "regex": ("llguidance",),
    "choice": ("llguidance", "xgrammar"),
    "grammar": ("xgrammar",),
    "structural_tag": ("llguidance",),
}


def choose_engine(structured: StructuredOutputs) -> Engine:
    """Return the engine of a structured output. Raises BadRequest if the named engine does not support its kind."""
    kind = structured.kind
    if structured.engine is None:
        return ENGINES[kind][0]
    if structured.engine not in ENGINES[kind]:
        raise BadRequest(
            f"structured_outputs.engine: must be {' or '.join(ENGINES[kind])} for {kind}, "
            f"got {quoted(structured.engine)}; leave it out"
        )
    return structured.engine
