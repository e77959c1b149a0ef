"""Optimization profiles: size ranges that an engine is tuned for, one profile per kind of call."""

from collections.abc import Mapping
from typing import Any

from tandemrt.engines.contract.calls import Range, Use, decoder_uses, fuse_use, head_use
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.recipe.tensorrt import TensorRtRtx
from tandemrt.engines.validation.errors import BadRecipe

Profile = Use  # symbol of the contract (batch, query, rows, window, ...) -> sizes


def decoder_profiles(recipe: Recipe) -> dict[str, Profile]:
    """Return one profile per use of a target or draft model."""
    limits, draft = recipe.limits, recipe.draft
    uses = decoder_uses(limits.batch, draft.num_draft_tokens, recipe.prefill_chunk(), draft.kind)
    if isinstance(recipe.backend, TensorRtRtx):
        # TensorRT-RTX 1.7 does not compile a prefill of exactly one row: it gives two operations one name.
        uses["prefill"] = {**uses["prefill"], "batch": Range(1, 1, limits.batch)}
    return uses


def fuse_profiles(recipe: Recipe) -> dict[str, Profile]:
    """Return the only profile of ``fuse``."""
    limits, draft = recipe.limits, recipe.draft
    return {"tokens": fuse_use(limits.batch, draft.num_draft_tokens, recipe.prefill_chunk(), draft.kind)}


def head_profiles(recipe: Recipe, contract: Contract) -> dict[str, Profile]:
    """Return the only profile of an engine without weights."""
    symbols = {dim for binding in contract.inputs for dim in binding.shape if isinstance(dim, str)}
    sizes = head_use(recipe.limits.batch, recipe.draft.num_draft_tokens)
    return {"round": {symbol: sizes[symbol] for symbol in sorted(symbols)}}


def optimization_profile(builder: Any, inputs: Mapping[str, tuple[int | str, ...]], profile: Profile) -> Any:
    """Make a profile for ``inputs``, name -> shape with symbols. Raises BadRecipe for a missing or invalid range."""
    optimization = builder.create_optimization_profile()
    for name, ranges in resolve(inputs, profile).items():
        optimization.set_shape(name, *zip(*ranges, strict=True))
    return optimization


def resolve(inputs: Mapping[str, tuple[int | str, ...]], profile: Profile) -> dict[str, list[Range]]:
    """Return the range of every dimension of every input. Raises BadRecipe."""
    return {name: [_range(name, dim, profile) for dim in shape] for name, shape in inputs.items()}


def _range(name: str, dim: int | str, profile: Profile) -> Range:
    if isinstance(dim, int):
        return Range(dim, dim, dim)
    if dim not in profile:
        raise BadRecipe(f"profile: input {name} has the dimension {dim!r}, which has no range; add one")
    sizes = Range(*profile[dim])
    least = 0 if dim == "window" else 1  # a step may have no drafts
    if not least <= sizes.least <= sizes.best <= sizes.most:
        raise BadRecipe(f"profile: a range must be {least} <= least <= best <= most; got {dim} {tuple(sizes)}")
    return sizes
