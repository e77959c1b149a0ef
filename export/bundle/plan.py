"""Estimate how many tokens of a checkpoint fit into a GPU's memory, before a bundle of it is built.

Only ``config.json`` and the sizes of the weights are read, so an index of weights that are not here is enough.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tandemrt.engines.contract.contract import BLOCK_SIZE, num_snapshots
from tandemrt.engines.contract.dtypes import BYTES
from tandemrt.engines.recipe.backends import BACKENDS
from tandemrt.engines.recipe.recipe import Recipe, locate
from tandemrt.engines.validation.errors import BadCheckpoint, BadRequest, quoted
from tandemrt.export.bundle.capacity import SHARE
from tandemrt.export.read.checkpoint import read_json
from tandemrt.export.read.spec import ModelSpec

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class PlannedCapacity:
    """Capacity of a target within ``SHARE`` of a GPU's ``memory``. Sizes are bytes.

    Attributes:
        weights: of the checkpoint, as they are stored; a draft's are in them if they are in its files.
        rounds: logits of a step with a full batch, and states of recurrent layers with copies for the prefix cache.
        token: keys and values of one token.
        tokens: number of tokens that fit.
    """

    memory: int
    weights: int
    rounds: int
    token: int
    tokens: int


def plan(model: str, memory: int) -> PlannedCapacity:
    """Return the plan for a recipe, or for the folder of a checkpoint, with the default batch and 4 draft tokens.

    Raises BadRecipe or BadCheckpoint for one that cannot be read, and BadRequest for a recipe whose target is not here
    or is split over several GPUs.
    """
    folder, batch, window, compute, kv_dtype = Path(model), 0, 4, "bfloat16", None
    ignored: Collection[str] = ()
    if not folder.is_dir():
        recipe = Recipe.load(locate(model))
        if recipe.ranks > 1:
            raise BadRequest(
                f"{quoted(model)}: backend.tensor_parallel must be 1 to plan for a GPU, it is {recipe.ranks}; build "
                "the bundle, and inspect that with --gpu"
            )
        ignored = recipe.target.ignore_config_fields
        folder, batch, window = recipe.target.checkpoint, recipe.limits.batch, recipe.draft.num_draft_tokens
        compute, kv_dtype = recipe.computed_in(str(recipe.target.dtype)), recipe.target.kv_dtype
        if not folder.is_dir():
            raise BadRequest(
                f"{quoted(model)}: its target {quoted(recipe.hub_name(folder) or folder)} must be here; download its "
                f"config.json and {_INDEX} into a folder, and name the folder"
            )
    else:  # the default of a GPU
        batch = max(backend.default_limits.batch for backend in BACKENDS.values() if backend.default_limits is not None)
    spec = ModelSpec.from_hf(read_json(folder / "config.json"), ignored=ignored)
    weights = _weights(folder)
    contract = spec.contract(capacity=BLOCK_SIZE, dtype=compute, cache="paged", kv_dtype=kv_dtype)
    one = {"blocks": 1, "slots": 1, "batch": 1}
    past = [binding for binding in contract.inputs if binding.name.startswith("past_")]
    sizes = {binding.name: prod(binding.resolve(one)) * BYTES[binding.dtype] for binding in past}
    caches = sum(size for name, size in sizes.items() if name.startswith(("past_key.", "past_value.")))
    states, logit = sum(sizes.values()) - caches, BYTES[contract["logits"].dtype]
    token = max(1, caches // BLOCK_SIZE)
    rounds = batch * (window + 1) * spec.vocab * logit + (batch + num_snapshots(batch, "paged")) * states
    tokens = max(0, int(memory * SHARE) - weights - rounds) // token
    return PlannedCapacity(memory, weights, rounds, token, tokens)


def _weights(folder: Path) -> int:
    """Return the bytes of a checkpoint's weights: of its files, else what its index says."""
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if files:
        return files
    metadata = read_json(folder / _INDEX).get("metadata", {})
    if not isinstance(metadata, dict):
        raise BadCheckpoint(f"{folder / _INDEX}: metadata must be an object, got {quoted(metadata)}; download it again")
    total = metadata.get("total_size")
    if isinstance(total, bool) or not isinstance(total, int) or total < 1:
        rule = "metadata.total_size must be a number of bytes"
        raise BadCheckpoint(f"{folder / _INDEX}: {rule}, got {quoted(total)}; download it again")
    return total
