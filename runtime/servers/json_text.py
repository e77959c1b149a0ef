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
    """Whether ``value``, the JSON of ``text``, has a text that UTF-8 cannot encode."""
    return bool(_ESCAPED_SURROGATE.search(text)) and not is_encodable(value)


def is_encodable(value: Any) -> bool:
    """Whether UTF-8 can encode all texts in a JSON value."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _double(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is beyond the range of numbers, about 1.8e308")
    return number
