"""Match module names against the lists of a quantization_config: names, patterns, parts of names.

A module may have two names, that of the graph and that of the checkpoint. A list names a module by either of them.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields

EMBEDDING = "model.embed_tokens"  # the matmul of a tied lm_head; no library quantizes it


def read_strings(fields: Fields, name: str) -> tuple[str, ...]:
    """Read a list of strings; () if the field is absent. Raises BadCheckpoint for another type."""
    strings: Any = fields.get(name, [])
    if not isinstance(strings, list) or not all(isinstance(each, str) for each in strings):
        raise BadCheckpoint(f"{fields.where}: {name} should be a list of strings, it is {quoted(strings)}")
    return tuple(strings)


def any_name(matches: Callable[[str], object]) -> Callable[..., bool]:
    """Return a test for modules with a name that ``matches``."""
    return lambda *names: any(map(matches, names))


def matmuls_except(ignored: Callable[..., bool], *, head: bool = False) -> Callable[..., bool]:
    """Return a test for matmuls of the layers, and lm_head if ``head``, except those that match ``ignored``."""

    def is_quantized(*names: str) -> bool:
        return (head if "lm_head" in names else EMBEDDING not in names) and not ignored(*names)

    return is_quantized


def match_name_parts(patterns: Sequence[str]) -> Callable[..., bool]:
    """Return a test for modules with one of ``patterns`` as complete name parts: "mlp.gate" not in "mlp.gate_proj"."""
    parts = [re.compile(rf"(?:^|\.){re.escape(pattern)}(?:\.|$)") for pattern in patterns]
    return any_name(lambda module: any(part.search(module) for part in parts))


def compile_pattern(pattern: str, where: str) -> re.Pattern[str]:
    """Compile a regular expression of a config. Raises BadCheckpoint if it is invalid."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadCheckpoint(f"{where}: {quoted(pattern)} should be a regular expression: {error}") from error
