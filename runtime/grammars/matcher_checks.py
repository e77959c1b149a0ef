"""Checks of the arguments that every grammar engine receives, and a limit on its fast-forward text."""

import numpy as np

from tandemrt.engines.validation.errors import InternalError

MAX_FAST_FORWARD_BYTES = 1024  # of fast-forward text; a draft window holds at most 16 tokens


def check_fillable(row: np.ndarray, words: int, *, ended: bool) -> None:
    """Raise InternalError unless ``row`` is int32[words], contiguous and writable, and the grammar has not ended.

    The engines write to an address, so any other buffer would corrupt memory.
    """
    if not isinstance(row, np.ndarray) or row.dtype != np.int32 or row.shape != (words,):
        raise InternalError(f"row: must be numpy int32 of shape [{words}], got {_describe(row)}")
    if not (row.flags.c_contiguous and row.flags.writeable):
        raise InternalError("row: must be C-contiguous and writable, got a strided or read-only view; pass a copy")
    if ended:
        raise InternalError("grammar: must not be filled after its end; call is_terminated() first")


def check_count(count: int) -> None:
    """Raise InternalError for a negative number of tokens to take back."""
    if count < 0:
        raise InternalError(f"count: must be >= 0, got {count}")


def _describe(row: object) -> str:
    return f"{row.dtype} {list(row.shape)}" if isinstance(row, np.ndarray) else type(row).__name__
