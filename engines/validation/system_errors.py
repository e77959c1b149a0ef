"""What to do about errors of the operating system, also where a library's error only quotes them."""

import errno
import os
import re

_ADVICE = {
    errno.ENOSPC: "free some space, or choose a folder on another disk",
    errno.EDQUOT: "free some of the quota, or choose a folder on another disk",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs: the system has too many open files",
}


def system_advice(error: Exception) -> str | None:
    """Return the cause and what to do, if a full disk or too many open files caused ``error``; else None."""
    number = error.errno if isinstance(error, OSError) else _quoted_number(str(error))
    return f"{os.strerror(number)}: {_ADVICE[number]}" if number in _ADVICE else None


def _quoted_number(text: str) -> int | None:
    if match := re.search(r"system error(?: number|:)? (\d+)", text, re.IGNORECASE):  # onnxruntime
        return int(match[1])
    return next((number for number in _ADVICE if os.strerror(number) in text), None)
