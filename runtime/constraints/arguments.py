"""What a constraint is made from, checked."""

import operator
from collections.abc import Iterable
from typing import Any

from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.runtime.constraints.thinking import ThinkingRule


def ids(name: str, tokens: Iterable[int], valid: int) -> list[int]:
    """The ids among ``tokens``, the argument ``name``: integers below ``valid``. Raises BadRequest."""
    found = []
    for token in tokens:
        try:
            number = operator.index(token)
        except TypeError:
            raise BadRequest(f"{name}: must be token ids, got {quoted(token)}") from None
        if not 0 <= number < valid:
            raise BadRequest(f"{name}: token ids must be in 0..{valid - 1}, got {quoted(number)}")
        found.append(number)
    return found


def check_lengths(min_tokens: Any, max_tokens: Any) -> None:
    """Raise BadRequest unless both are integers in order; ``max_tokens`` None: as many as there is room for."""
    for name, value, least in (("min_tokens", min_tokens, 0), ("max_tokens", max_tokens, 1)):
        if value is None and name == "max_tokens":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadRequest(f"{name}: must be an integer >= {least}, got {quoted(value)}")
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens: must not be above max_tokens ({quoted(max_tokens)}), got {quoted(min_tokens)}")


def check_markers(rule: ThinkingRule, stops: frozenset[int], valid: int) -> None:
    """Raise BadRequest for a marker with an id from ``valid`` on, or with a stop token."""
    named = [("start", rule.start), ("forced_end", rule.forced_end)]
    named += [("ends", end) for end in rule.ends] + [("implicit_ends", end) for end in rule.implicit_ends]
    for name, marker in named:
        if max(marker) >= valid:
            raise BadRequest(f"thinking.{name}: token ids must be in 0..{valid - 1}, got {quoted(list(marker))}")
        if stops.intersection(marker):
            raise BadRequest(f"thinking.{name}: must not contain a stop token, got {quoted(list(marker))}")
