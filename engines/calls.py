"""Which calls a bundle's rounds make of its engines: how many rows, tokens and drafts, and how much room a row needs.

Recipe and manifest, TensorRT's profiles, what an opened engine must take, the capture of CUDA graphs and ``export
check`` derive from it. Sizes are named by the symbols of engines/contract.py.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

Sizes = Mapping[str, int]  # symbol -> size


class Range(NamedTuple):
    """The sizes a symbolic dimension may take; ``best`` is the one an engine is tuned for."""

    least: int
    best: int
    most: int


Use = Mapping[str, Range]  # symbol -> sizes


class Shape(NamedTuple):
    """The shape of a round: rows of its calls and drafted tokens per row."""

    batch: int
    window: int


def capacity(length: int, window: int) -> int:
    """Tokens of a cache row for a text of ``length`` tokens, prompt included.

    The slack takes the padded tail of the last window, and what a finished request's row writes until the host has
    seen its end.
    """
    return length + window + 1


def bucket(rows: int, slots: int) -> int:
    """The smallest of 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, … that holds ``rows``, at most ``slots``.

    These are the batch sizes of rounds: few, so that each is bound and captured once.
    """
    power = 1 << (rows - 1).bit_length()
    between = power * 3 // 4  # halfway to the power below
    return min(slots, between if rows <= between and power > 8 else power)


def buckets(slots: int) -> list[int]:
    """All batch sizes of a runtime with ``slots`` slots, smallest first."""
    return sorted({bucket(rows, slots) for rows in range(1, slots + 1)})


def rounds(slots: int, window_of: Callable[[int], int]) -> list[Shape]:
    """Every shape that rounds of requests without a window of their own have; ``window_of`` so many of them.

    Few requests may sit in high slots, so a large batch goes with the window of a small number as well.
    """
    return [
        Shape(batch, window)
        for batch in buckets(slots)
        for window in sorted({window_of(live) for live in range(1, batch + 1)})
    ]


def drafted(window: int) -> tuple[int, ...]:
    """The numbers of drafted tokens that differ in kind: none, and a whole window."""
    return tuple(dict.fromkeys((0, window)))


def decoder_uses(batch: int, window: int, chunk: int) -> dict[str, Use]:
    """The uses of a target or draft model: ``prefill`` (a chunk), ``window`` (of a round), ``single`` (one token)."""
    rows = window + 1
    one, every = Range(1, 1, 1), Range(1, batch, batch)
    uses: dict[str, Use] = {
        "prefill": {"batch": Range(1, 1, batch), "query": Range(1, chunk, chunk), "rows": one},
        "window": {"batch": every, "query": Range(1, rows, rows), "rows": Range(1, rows, rows)},
        "single": {"batch": every, "query": one, "rows": one},
    }
    return uses if window else {use: uses[use] for use in ("prefill", "single")}


def largest_calls(batch: int, window: int, chunk: int) -> tuple[Sizes, ...]:
    """The largest calls of a target or draft model: a window of every slot, and a chunk of one prompt.

    A window has two tokens at least, as a draft model's first run of a round has. A packed call may have both.
    """
    query = max(2, window + 1)
    return (
        {"batch": batch, "query": query, "rows": query, "tokens": batch * query + chunk},
        {"batch": 1, "query": chunk, "rows": 1, "tokens": chunk},
    )


def head_use(batch: int, window: int) -> Use:
    """The one use of an engine without weights, such as verification: a round of every size."""
    return {
        "batch": Range(1, batch, batch),
        "window": Range(0, window, window),
        "window+1": Range(1, window + 1, window + 1),
    }


def outermost(engine: str, batch: int, window: int, chunk: int) -> list[Sizes]:
    """The smallest and largest sizes that rounds and prefill ask of ``engine``, a manifest's name."""
    found: list[Sizes] = []
    for size in dict.fromkeys((1, batch)):
        if engine == "target":
            found += [{"batch": size, "query": k + 1, "rows": k + 1} for k in drafted(window)]
        elif engine == "draft":  # its first run of a round takes two tokens
            found += [{"batch": size, "query": query, "rows": 1} for query in (1, 2)]
        else:
            found += [{"batch": size, "window": k, "window+1": k + 1} for k in drafted(window)]
    if engine in ("target", "draft"):
        found += [{"batch": 1, "query": query, "rows": 1} for query in dict.fromkeys((1, chunk))]
    return found
