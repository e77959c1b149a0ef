"""JSON of clients: only what can be written again, because answers repeat parts of it."""

import json
import math
import re
from typing import Any

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # as a rule half of a pair


def parse_json_text(text: str) -> Any:
    """Parse JSON. Raises ValueError, also for NaN and for a number beyond the range of a double."""
    return json.loads(text, parse_constant=_reject_constant, parse_float=_double)


def lone_surrogate(text: str, value: Any) -> bool:
    """Whether ``value``, a part of the JSON ``text``, has a text that UTF-8 cannot encode."""
    if not _ESCAPED_SURROGATE.search(text):
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _double(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is beyond the range of numbers, about 1.8e308")
    return number
