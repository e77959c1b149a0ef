"""Which modules a quantization_config means: names, patterns, suffixes."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields

EMBEDDING = "model.embed_tokens"  # as the product of a tied head; no library takes it for one


def strings(fields: Fields, name: str) -> tuple[str, ...]:
    """The strings of a list; none where the field is absent. Raises BadCheckpoint."""
    found: Any = fields.get(name, [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise BadCheckpoint(f"{fields.where}: {name} should be a list of strings, it is {quoted(found)}")
    return tuple(found)


def layers_but(left: Callable[[str], bool], *, head: bool = False) -> Callable[[str], bool]:
    """All products of the layers (and the head), without those that ``left`` names."""

    def names(module: str) -> bool:
        return (head if module == "lm_head" else module != EMBEDDING) and not left(module)

    return names


def parts_of(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Modules whose names hold one of ``patterns``, whole parts of it: "mlp.gate" is not in "mlp.gate_proj"."""
    parts = [re.compile(rf"(?:^|\.){re.escape(pattern)}(?:\.|$)") for pattern in patterns]
    return lambda module: any(part.search(module) for part in parts)


def expression(pattern: str, where: str) -> re.Pattern[str]:
    """A regular expression of a config. Raises BadCheckpoint if it is none."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadCheckpoint(f"{where}: {quoted(pattern)} should be a regular expression: {error}") from error
