"""Return free memory of this process to the operating system."""

import ctypes
from contextlib import suppress


def trim_memory() -> None:
    """Return memory that the allocator keeps for later to the system, so that it does not count as resident."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
