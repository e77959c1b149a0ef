"""What every engine demands of those who call it: a buffer that may be written, a text that goes on, tokens to undo."""

import numpy as np

from tandemrt.engines.errors import InternalError

LONGEST_FORCED = 1024  # bytes of what a text must go on with: a window drafts at most 16 tokens


def check_fillable(row: np.ndarray, words: int, *, ended: bool) -> None:
    """Raise InternalError unless ``row`` is int32[words], contiguous and writable, and the grammar has not ended.

    The engines write through an address, so any other buffer would be wrong memory.
    """
    if not isinstance(row, np.ndarray) or row.dtype != np.int32 or row.shape != (words,):
        raise InternalError(f"row: must be numpy int32 of shape [{words}], got {_describe(row)}")
    if not (row.flags.c_contiguous and row.flags.writeable):
        raise InternalError("row: must be C-contiguous and writable, got a strided or read-only view; pass a copy")
    if ended:
        raise InternalError("grammar: must not be filled after its end; ask is_terminated() first")


def check_count(count: int) -> None:
    """Raise InternalError for a number of tokens that cannot be taken back."""
    if count < 0:
        raise InternalError(f"count: must be >= 0, got {count}")


def _describe(row: object) -> str:
    return f"{row.dtype} {list(row.shape)}" if isinstance(row, np.ndarray) else type(row).__name__
