"""Batch-invariant calls that compute the rows of prompts otherwise than those of windows.

A token is computed either as part of a prompt or as part of a window, whatever else is in the call. So an operator may
use another algorithm for the rows of prompts, which come last in a packed call.
"""

from collections.abc import Collection, Sequence

from tandemrt.plugins.kernels.module import Tensors
from tandemrt.plugins.operators.launch import Call


def split_rows(tensors: Tensors, by_row: Collection[str]) -> tuple[Tensors | None, Tensors | None]:
    """Return the tensors of the rows of windows, and those of prompts; None: no rows.

    ``by_row`` are the names of the tensors with these rows, which are flattened. Without ``prompt_rows`` no row belongs
    to a prompt.
    """
    flat = {name: tensor for name, tensor in tensors.items() if name != "prompt_rows"}
    flat |= {name: flat[name].flatten(0, -2) for name in by_row}
    rows = len(flat[next(iter(by_row))])
    windows = rows - len(tensors.get("prompt_rows", ()))
    parts = (slice(0, windows), slice(windows, rows))
    first, last = (flat | {name: flat[name][part] for name in by_row} for part in parts)
    return first if windows else None, last if windows < rows else None


class CallInParts:
    """A bound call that consists of others. Capturable if they are."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        for call in self._calls:
            call.run()
