"""Estimate from the manifest how many KV cache tokens of a bundle fit into a GPU's memory."""

import re
from dataclasses import dataclass, replace
from math import prod
from typing import get_args

from tandemrt.engines.bundle.digest import holds_weights
from tandemrt.engines.bundle.manifest import COLUMNS, Manifest
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import BLOCK_SIZE, blocks_of, num_snapshots
from tandemrt.engines.contract.dtypes import BYTES
from tandemrt.engines.recipe.backends import Ranks
from tandemrt.engines.validation.errors import BadRequest, quoted

RANKS = get_args(Ranks)
SHARE = 0.9  # share of a GPU's memory; CUDA and activations, which are not counted, need the rest
_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Capacity:
    """Capacity of a bundle within ``SHARE`` of a GPU's ``memory``. Sizes are bytes.

    Attributes:
        memory: of the GPU.
        gpus: number of GPUs that the target is split over. All sizes are those of the first, which also has the draft.
        weights: of all engines.
        rounds: logits of a step with a full batch, draft probabilities, states of recurrent layers, copies for the
            prefix cache included, and what the vision tower needs for the largest image.
        token: keys and values of one token, in all models together.
        tokens: number of tokens that fit into the KV caches.
        requests: number of requests of the bundle's full length that fit.
    """

    memory: int
    gpus: int
    weights: int
    rounds: int
    token: int
    tokens: int
    requests: int


def memory_from_text(text: str) -> int:
    """Parse ``80GB``, ``24GiB``, ``512MB`` into bytes. Raises BadRequest."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(MB|GB|MiB|GiB)", text.strip())
    if match is None or not float(match[1]):
        raise BadRequest(f"--gpu: must be a memory such as 80GB or 24GiB, received {quoted(text)}")
    return int(float(match[1]) * _UNITS[match[2]])


def fitting(manifest: Manifest, memory: int, gpus: int | None = None) -> Capacity:
    """Return the capacity of a GPU of ``memory`` bytes, for any cache layout of the bundle.

    ``gpus``: as if the target were split over as many; None: as it was built. Raises BadRequest for a number that a
    target that was built for several ranks does not have.
    """
    limits, ranks = manifest.limits, 1 + len(manifest.ranks)
    gpus = ranks if gpus is None else gpus
    if ranks not in (1, gpus) or gpus not in RANKS:
        wanted = ", ".join(map(str, RANKS)) if ranks == 1 else f"{ranks}, for which this bundle was built"
        raise BadRequest(f"--gpus: must be {wanted}, received {quoted(gpus)}")
    per_rank = _caches(manifest, gpus // ranks)
    weights = _weights(manifest, gpus)
    caches = [each for each in per_rank if each.name.startswith(("past_key.", "past_value."))]
    states = [each for each in per_rank if each not in caches]  # of recurrent layers, of a fixed size per slot
    per_token = sum(_per_token(each, limits.capacity) for each in caches)
    logits = manifest.engines["target"].contract["logits"]
    slots = limits.batch + num_snapshots(limits.batch, limits.cache)
    rows = limits.batch * (limits.num_draft_tokens + 1)
    rounds = (
        rows * manifest.vocab * BYTES[logits.dtype]
        + limits.batch * limits.num_draft_tokens * manifest.vocab * BYTES["float32"]
        + slots * sum(prod(each.resolve({"batch": 1, "slots": 1})) * BYTES[each.dtype] for each in states)
    )
    if manifest.vision is not None:
        rounds += manifest.vision.working_bytes(limits.length)
    left = max(0, int(memory * SHARE) - weights - rounds)
    tokens = left // per_token
    row = blocks_of(limits.capacity) * BLOCK_SIZE
    return Capacity(memory, gpus, weights, rounds, per_token, tokens, tokens // row)


def _weights(manifest: Manifest, gpus: int) -> int:
    """Return the bytes of weights on the first GPU: its part of the target, the target's whole weights, and the draft.

    The embedding and the matmuls to latent vectors are whole on each GPU; routers and norms, which are small, count as
    split.
    """
    columns = sum(file.size for name, file in manifest.files.items() if name.startswith(f"target/{COLUMNS}"))
    whole = manifest.weights - columns  # these are also in the files of the checkpoint
    if gpus == 1:
        return whole
    target = sum(f.size for name, f in manifest.files.items() if name.startswith("target/") and holds_weights(name))
    spec, size = manifest.specs["target"], BYTES[manifest.engines["target"].dtype]
    embedding, latent = manifest.vocab * int(spec["hidden"]) * size, _latent_weights(manifest) * size
    alone = latent + (embedding if not spec["tied"] else 0)  # a tied one is the head, too, which is split
    split = target - columns - alone
    return whole - target + columns + embedding + latent + -(-split // gpus)


def _latent_weights(manifest: Manifest) -> int:
    """Return the number of weights of the matmuls from the residual stream to latent vectors."""
    spec = manifest.specs["target"]
    if (latent := spec["latent"]) is None:
        return 0
    layers = sum(each.name.startswith("past_key.") for each in manifest.engines["target"].contract.inputs)
    width = (latent["query_rank"] or 0) + latent["rank"] + latent["rotated"]
    return layers * int(spec["hidden"]) * int(width)


def _caches(manifest: Manifest, parts: int) -> list[Binding]:
    """Return the caches of all models, those of the target on one of ``parts`` GPUs."""
    return [_part(each, parts) if name == "target" else each for name, each in manifest.caches]


def _part(cache: Binding, parts: int) -> Binding:
    """Return a cache of the target on one of ``parts`` GPUs: a part of its heads, or of the values of recent tokens.

    A KV head or a latent vector that several GPUs read is on each of them.
    """
    axis = 2 if cache.name.startswith("past_recent.") else 1
    size = cache.shape[axis]
    assert isinstance(size, int)
    return replace(cache, shape=(*cache.shape[:axis], max(1, size // parts), *cache.shape[axis + 1 :]))


def _per_token(cache: Binding, row: int) -> int:
    """Return the bytes of one token in one cache binding."""
    size = prod(cache.resolve({"batch": 1, "blocks": 1})) * BYTES[cache.dtype]
    return size // (BLOCK_SIZE if "blocks" in cache.shape else row)
