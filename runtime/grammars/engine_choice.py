"""Choice of the grammar engine for each kind of structured output."""

from typing import Literal

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.engines.validation.extras import pip_install
from tandemrt.runtime.grammars import xgrammar_library

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
    """Return the engine of a structured output.

    Raises BadRequest if the named engine does not support its kind, or if the engine is not installed.
    """
    kind = structured.kind
    engine = ENGINES[kind][0] if structured.engine is None else structured.engine
    if engine not in ENGINES[kind]:
        raise BadRequest(
            f"structured_outputs.engine: must be {' or '.join(ENGINES[kind])} for {kind}, "
            f"got {quoted(structured.engine)}; leave it out"
        )
    if engine == "xgrammar" and not xgrammar_library.is_installed():
        others = len(ENGINES[kind]) > 1
        raise BadRequest(
            f"structured_outputs.{'engine' if others else kind}: needs xgrammar, which is not installed on this "
            f"machine: {pip_install('xgrammar')}{', or leave it out' if others else ''}"
        )
    return engine
