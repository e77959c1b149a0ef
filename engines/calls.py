"""Which calls a bundle's rounds make of its engines: how many rows, tokens and drafts, and how much room a row needs.

Recipe and manifest, TensorRT's profiles, what an opened engine must take, the capture of CUDA graphs and ``export
check`` derive from it. Sizes are named by the symbols of engines/contract.py.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tandemrt.engines.contract import CacheKind
from tandemrt.engines.drafts import DRAFT_LAYERS, DRAFTS, LONGEST_BLOCK

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


class Packed(NamedTuple):
    """What a packed call has beside windows: tokens of prompts, padding included, and runs of them."""

    prompt_tokens: int
    prompts: int


NO_PROMPTS = Packed(0, 0)
TILE = 128  # rows that a product computes at a time on a GPU: a call of one more token costs as much as one of all
QUICK = 1024  # tokens of a call that a GPU may have computed before its host has enqueued it
_LEAST = 16  # tokens of a packed call


def capacity(length: int, window: int) -> int:
    """Tokens of a cache row for a text of ``length`` tokens, prompt included.

    The slack takes the padded tail of the last window, and what a finished request's row writes until the host has
    seen its end.
    """
    return length + window + 1


def slack(kind: str, window: int) -> int:
    """Tokens behind the newest one that a round which drafts ``window`` may write; ``kind`` is that of the draft.

    A parallel draft is fed what a whole window emitted and the masks of the next one, whatever was emitted; a block
    draft always a block as long as its own. Several layers that predict further on are fed some places again, or as
    many behind a text of which they keep none.
    """
    if kind == "mtp" and window:
        return window + len(DRAFT_LAYERS) - 1
    if DRAFTS[kind].block and window:
        return LONGEST_BLOCK - 1
    return 2 * window - 1 if DRAFTS[kind].parallel and window else window


def longest_chunk(batch: int, length: int, cache: CacheKind) -> int:
    """The most prompt tokens that a round may take: over a paged cache, prompts of all slots are one call."""
    return length if cache == "linear" else batch * length


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


def rounds(slots: int, windows_of: Callable[[int], Iterable[int]]) -> list[Shape]:
    """Every shape that rounds of requests without a window of their own have; ``windows_of`` so many of them.

    Few requests may sit in high slots, so a large batch goes with the window of a small number as well.
    """
    return [
        Shape(batch, window)
        for batch in buckets(slots)
        for window in sorted({window for live in range(1, batch + 1) for window in windows_of(live)})
    ]


def packed(windows: int, tokens: int, runs: int) -> Packed:
    """The packed call that has room for ``tokens`` of ``runs`` prompts beside ``windows`` tokens of windows.

    Few sizes, so that the same come again: the call has a power of two of tokens, or, from TILE on, a multiple of it,
    and a power of four of runs, of which those without tokens cost nothing.
    """
    if not tokens:
        return NO_PROMPTS
    return Packed(_whole(windows + tokens) - windows, _power_of_four(runs))


def beside(windows: int, prompts: Packed) -> Packed:
    """The packed call with the same ``prompts`` beside another number of tokens of windows: a draft's."""
    return packed(windows, prompts.prompt_tokens, prompts.prompts)


def packed_sizes(most: int) -> list[int]:
    """Tokens of all packed calls of at most ``most`` tokens, smallest first: few, so all can be run beforehand."""
    powers = [1 << power for power in range(_LEAST.bit_length() - 1, TILE.bit_length())]
    return [size for size in (*powers, *range(2 * TILE, most + 1, TILE)) if size <= most]


def largest_prompts(batch: int, chunk: int) -> Packed:
    """What ``packed`` has at most, and ``beside`` of it, for ``chunk`` prompt tokens of ``batch`` prompts."""
    return Packed(max(chunk, TILE) + 2 * TILE, _power_of_four(batch))


def most_query(kind: str, window: int) -> int:
    """The most new tokens per row of a round's calls: a draft model's first run of a round has two.

    ``kind`` is that of the draft.
    """
    return max(2, 1 + slack(kind, window))


def unpadded(windows: int, most: int) -> int:
    """The largest number of prompt tokens up to ``most`` that leaves no padding in a packed call beside ``windows``.

    ``most`` itself, where more than half of it would be lost.
    """
    fitting = (windows + most) // TILE * TILE - windows
    return fitting if 2 * fitting >= most else most


def _power_of_four(runs: int) -> int:
    return int(1 << -(-(runs - 1).bit_length() // 2) * 2)


def _whole(tokens: int) -> int:
    return max(_LEAST, 1 << (tokens - 1).bit_length()) if tokens <= TILE else -(-tokens // TILE) * TILE


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


def largest_calls(kind: str, batch: int, window: int, chunk: int) -> tuple[Sizes, ...]:
    """The largest calls of a target or a draft of ``kind``: a window of every slot, and a chunk of one prompt.

    A packed call has both, and padding: that of the target's call, and that of a draft's beside it.
    """
    query = most_query(kind, window)
    return (
        {"batch": batch, "query": query, "rows": query, "tokens": _whole(batch * query + chunk) + TILE},
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
        if batch > 1:  # prompts of slots side by side
            found.append({"batch": batch, "query": max(1, chunk // batch), "rows": 1})
    return found
