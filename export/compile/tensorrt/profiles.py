"""Optimization profiles: the sizes an engine is tuned for, one profile per use."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tandemrt.engines.contract import Contract
from tandemrt.engines.errors import BadRecipe
from tandemrt.engines.recipe import Recipe


class Range(NamedTuple):
    """The sizes a symbolic dimension may take; ``best`` is the one the engine is tuned for."""

    least: int
    best: int
    most: int


Profile = Mapping[str, Range]  # symbol of the contract (batch, query, rows, window, ...) -> sizes


def decoder_profiles(recipe: Recipe) -> dict[str, Profile]:
    """The uses of a target or draft model: ``prefill`` (a chunk), ``window`` (of a round), ``single`` (one token)."""
    batch, window, chunk = recipe.limits.batch, recipe.draft.window + 1, recipe.limits.prefill_chunk
    one, rows = Range(1, 1, 1), Range(1, batch, batch)
    uses: dict[str, Profile] = {
        "prefill": {"batch": Range(1, 1, batch), "query": Range(1, chunk, chunk), "rows": one},
        "window": {"batch": rows, "query": Range(1, window, window), "rows": Range(1, window, window)},
        "single": {"batch": rows, "query": one, "rows": one},
    }
    return uses if window > 1 else {use: uses[use] for use in ("prefill", "single")}


def head_profiles(recipe: Recipe, contract: Contract) -> dict[str, Profile]:
    """The one use of an engine without weights, such as verification: a round of every size."""
    batch, window = recipe.limits.batch, recipe.draft.window
    symbols = {dim for binding in contract.inputs for dim in binding.shape if isinstance(dim, str)}
    sizes = {
        "batch": Range(1, batch, batch),
        "window": Range(0, window, window),
        "window+1": Range(1, window + 1, window + 1),
    }
    return {"round": {symbol: sizes[symbol] for symbol in sorted(symbols)}}


def optimization_profile(builder: Any, inputs: Mapping[str, tuple[int | str, ...]], profile: Profile) -> Any:
    """Make a profile for ``inputs``, name -> shape with symbols. Raises BadRecipe for a missing or wrong range."""
    made = builder.create_optimization_profile()
    for name, ranges in resolve(inputs, profile).items():
        made.set_shape(name, *zip(*ranges, strict=True))
    return made


def resolve(inputs: Mapping[str, tuple[int | str, ...]], profile: Profile) -> dict[str, list[Range]]:
    """The range of every dimension of every input. Raises BadRecipe."""
    return {name: [_range(name, dim, profile) for dim in shape] for name, shape in inputs.items()}


def _range(name: str, dim: int | str, profile: Profile) -> Range:
    if isinstance(dim, int):
        return Range(dim, dim, dim)
    if dim not in profile:
        raise BadRecipe(f"profile: input {name} has the dimension {dim!r}, which has no range; add one")
    found = Range(*profile[dim])
    least = 0 if dim == "window" else 1  # a round may draft nothing
    if not least <= found.least <= found.best <= found.most:
        raise BadRecipe(f"profile: a range must be {least} <= least <= best <= most; got {dim} {tuple(found)}")
    return found
