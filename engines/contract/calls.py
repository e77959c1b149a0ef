"""Sizes of the calls that rounds make to a bundle's engines: rows, tokens, drafts, and the capacity of a cache row.

Recipe, manifest, TensorRT profiles, checks of opened engines, CUDA graph capture and ``tandemrt check`` derive from
these functions. Sizes are named by the symbols of engines/contract/contract.py.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tandemrt.engines.contract.contract import CacheKind
from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS, DRAFT_LAYERS, MAX_BLOCK_DRAFT
from tandemrt.engines.contract.vision import VisionEntry

Sizes = Mapping[str, int]  # symbol -> size


class Range(NamedTuple):
    """Sizes of a symbolic dimension; an engine is tuned for ``best``."""

    least: int
    best: int
    most: int


Use = Mapping[str, Range]  # symbol -> sizes


class Shape(NamedTuple):
    """Shape of a round: rows of its calls, and drafted tokens per row."""

    batch: int
    window: int


class Packed(NamedTuple):
    """The prompt part of a packed call: prompt tokens with padding, and runs of prompts."""

    prompt_tokens: int
    prompts: int


NO_PROMPTS = Packed(0, 0)
TILE = 128  # rows that a matmul on a GPU computes at a time: TILE + 1 tokens cost as much as 2 * TILE
_LEAST = 16  # tokens of a packed call


def capacity(length: int, slack: int) -> int:
    """Return the tokens of a cache row for a text of ``length`` tokens, prompt included.

    ``slack`` tokens (see ``slack`` below) hold the padded end of the last draft window, and the tokens that a finished
    request's row writes until the host has seen its end.
    """
    return length + slack + 1


def slack(kind: str, window: int) -> int:
    """Return how many tokens after the newest one a round that drafts ``window`` tokens may write.

    ``kind`` is the draft's. A parallel draft gets a full window of tokens and the masks of the next window, even if
    fewer tokens were emitted. A block draft gets a block of fixed length. MTP layers get one position more per further
    layer: the last positions of the text again, or positions past its end, whose results are discarded.
    """
    traits = DRAFT_KINDS[kind]
    if not window:
        return 0
    if traits.block:
        return MAX_BLOCK_DRAFT - 1
    return 2 * window - 1 if traits.parallel else window + traits.layers - 1


def longest_chunk(batch: int, length: int, cache: CacheKind) -> int:
    """Return the most prompt tokens of a round: over a paged cache, one call holds the prompts of all slots."""
    return length if cache == "linear" else batch * length


def bucket(rows: int, slots: int) -> int:
    """Return the smallest of 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, … that holds ``rows``, at most ``slots``.

    These are the batch sizes of rounds. There are few of them, so that each is bound and captured once.
    """
    power = 1 << (rows - 1).bit_length()
    between = power * 3 // 4  # halfway to the power below
    return min(slots, between if rows <= between and power > 8 else power)


def buckets(slots: int) -> list[int]:
    """Return all batch sizes of a runtime with ``slots`` slots, smallest first."""
    return sorted({bucket(rows, slots) for rows in range(1, slots + 1)})


def rounds(slots: int, windows_of: Callable[[int], Iterable[int]]) -> list[Shape]:
    """Return every shape of rounds whose requests do not set num_draft_tokens.

    ``windows_of`` returns the draft lengths for a number of requests. A few requests may occupy high slots, so a large
    batch also runs with the draft lengths of a small number of requests.
    """
    return [
        Shape(batch, window)
        for batch in buckets(slots)
        for window in sorted({window for live in range(1, batch + 1) for window in windows_of(live)})
    ]


def packed(windows: int, tokens: int, runs: int) -> Packed:
    """Return the packed call that holds ``tokens`` of ``runs`` prompts and ``windows`` tokens of draft windows.

    There are few sizes, so that they recur: a call has a power of two of tokens, or a multiple of TILE from there on,
    and a power of four of runs. Runs without tokens cost nothing.
    """
    if not tokens:
        return NO_PROMPTS
    return Packed(_padded(windows + tokens) - windows, _power_of_four(runs))


def repacked(windows: int, prompts: Packed) -> Packed:
    """Return the packed call with the same ``prompts`` and another number of window tokens: a draft's call."""
    return packed(windows, prompts.prompt_tokens, prompts.prompts)


def packed_sizes(most: int) -> list[int]:
    """Return the sizes of all packed calls of at most ``most`` tokens, smallest first, for warm-up."""
    powers = [1 << power for power in range(_LEAST.bit_length() - 1, TILE.bit_length())]
    return [size for size in (*powers, *range(2 * TILE, most + 1, TILE)) if size <= most]


def largest_prompts(batch: int, chunk: int) -> Packed:
    """Return the largest result of ``packed`` and ``repacked`` for ``chunk`` prompt tokens of ``batch`` prompts."""
    return Packed(max(chunk, TILE) + 2 * TILE, _power_of_four(batch))


def most_query(kind: str, window: int) -> int:
    """Return the most new tokens per row of a round's calls; ``kind`` is the draft's.

    A draft model's first call of a round has two tokens per row.
    """
    return max(2, 1 + slack(kind, window))


def unpadded(windows: int, most: int) -> int:
    """Return the number of prompt tokens that fills a packed call of ``most`` tokens, ``windows`` of them of windows.

    The call needs no padding. Returns ``most`` if the number would be less than half of it.
    """
    fitting = most // TILE * TILE - windows
    return fitting if 2 * fitting >= most else most


def _power_of_four(runs: int) -> int:
    return int(1 << -(-(runs - 1).bit_length() // 2) * 2)


def _padded(tokens: int) -> int:
    return max(_LEAST, 1 << (tokens - 1).bit_length()) if tokens <= TILE else -(-tokens // TILE) * TILE


def drafted(window: int) -> tuple[int, ...]:
    """Return the draft lengths that need different calls: 0 and a full window."""
    return tuple(dict.fromkeys((0, window)))


def decoder_uses(batch: int, window: int, chunk: int, kind: str = "model") -> dict[str, Use]:
    """Return the uses of a decoder: ``prefill`` (of one prompt), ``window`` (to verify) and ``single`` (one token).

    An engine takes scratch memory for the largest call of each use: chunks of all slots would take many times as much.

    ``kind`` is the draft's.
    """
    rows, query = window + 1, most_query(kind, window)
    one, every = Range(1, 1, 1), Range(1, batch, batch)
    uses: dict[str, Use] = {
        "prefill": {"batch": one, "query": Range(1, chunk, chunk), "rows": one, "image_tokens": Range(1, 1, 1 + chunk)},
        "window": {"batch": every, "query": Range(1, rows, query), "rows": Range(1, rows, rows), "image_tokens": one},
        "single": {"batch": every, "query": one, "rows": one, "image_tokens": one},
    }
    return uses if window else {use: uses[use] for use in ("prefill", "single")}


def largest_calls(kind: str, batch: int, window: int, chunk: int) -> tuple[Sizes, ...]:
    """Return the largest calls of a target or a draft of ``kind``: a window per slot, and a chunk of one prompt.

    A packed call has both, and the padding of the target's call and of the draft's.
    """
    query = most_query(kind, window)
    return (
        {"batch": batch, "query": query, "rows": query, "tokens": _padded(batch * query + chunk) + TILE},
        {"batch": 1, "query": chunk, "rows": 1, "tokens": chunk},
    )


def head_use(batch: int, window: int) -> Use:
    """Return the one use of an engine without weights, such as verification: rounds of every size."""
    return {
        "batch": Range(1, batch, batch),
        "window": Range(0, window, window),
        "window+1": Range(1, window + 1, window + 1),
    }


def tower_use(entry: VisionEntry, length: int) -> Use:
    """Return the one use of a vision tower: images in prompts of fewer than ``length`` tokens.

    A row or column of tokens has at most one window more than fit into it. Patches have at most 4 ``corners`` with
    ``grid_corners`` only: LFM2-VL needs up to 8, but TensorRT rejects its recurrent layers.
    """
    most, patches = entry.most_tokens(length), entry.merge_size**2
    best, windows = min(most, 1024), 1 + most // max(1, entry.window_side)
    return {
        "image_tokens": Range(1, best, most),
        "patches": Range(patches, best * patches, most * patches),
        "windows": Range(1, min(windows, best // max(1, entry.window_side**2) + 1), windows),
        "corners": Range(1, 4, 4),
    }


def fuse_use(batch: int, window: int, chunk: int, kind: str) -> Use:
    """Return the one use of the engine ``fuse``: the tokens of a target's call; ``kind`` is the draft's."""
    rows = batch * (window + 1)
    return {"tokens": Range(1, rows, max(batch * most_query(kind, window), batch, chunk))}


def outermost(engine: str, batch: int, window: int, chunk: int) -> list[Sizes]:
    """Return the smallest and largest sizes of calls to ``engine``, a manifest's name; none of a vision tower."""
    if engine == "fuse":
        return [{"tokens": tokens} for tokens in (1, batch * (window + 1), chunk)]
    if engine == "vision":
        return []
    sizes: list[Sizes] = []
    for size in dict.fromkeys((1, batch)):
        if engine == "target":
            sizes += [{"batch": size, "query": k + 1, "rows": k + 1, "image_tokens": 1} for k in drafted(window)]
        elif engine in DRAFT_LAYERS:  # its first call of a round has two tokens
            sizes += [{"batch": size, "query": query, "rows": 1} for query in (1, 2)]
        else:
            sizes += [{"batch": size, "window": k, "window+1": k + 1} for k in drafted(window)]
    if engine in ("target", *DRAFT_LAYERS):
        prompts = dict.fromkeys((1, chunk))
        sizes += [{"batch": 1, "query": query, "rows": 1, "image_tokens": 1 + query} for query in prompts]
    return sizes
