"""Estimate from the manifest how many KV cache tokens of a bundle fit into a GPU's memory."""

import re
from dataclasses import dataclass
from math import prod

from tandemrt.engines.bundle.manifest import Manifest
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import BLOCK_SIZE, blocks_of
from tandemrt.engines.contract.dtypes import BYTES
from tandemrt.engines.validation.errors import BadRequest, quoted

SHARE = 0.9  # share of a GPU's memory; CUDA and activations, which are not counted, need the rest
_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Capacity:
    """Capacity of a bundle within ``SHARE`` of a GPU's ``memory``. Sizes are bytes.

    Attributes:
        memory: of the GPU.
        weights: of all engines.
        rounds: logits of a step with a full batch, draft probabilities, and states of recurrent layers.
        token: keys and values of one token, in all models together.
        tokens: number of tokens that fit into the KV caches.
        requests: number of requests of the bundle's full length that fit.
    """

    memory: int
    weights: int
    rounds: int
    token: int
    tokens: int
    requests: int


def memory_from_text(text: str) -> int:
    """Parse ``80GB``, ``24GiB``, ``512MB`` into bytes. Raises BadRequest."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(MB|GB|MiB|GiB)", text.strip())
    if found is None or not float(found[1]):
        raise BadRequest(f"--gpu: must be a memory such as 80GB or 24GiB, received {quoted(text)}")
    return int(float(found[1]) * _UNITS[found[2]])


def fitting(manifest: Manifest, memory: int) -> Capacity:
    """Return the capacity of a GPU of ``memory`` bytes, for any cache layout of the bundle."""
    limits = manifest.limits
    held = _caches(manifest)
    caches = [each for each in held if each.name.startswith(("past_key.", "past_value."))]
    states = [each for each in held if each not in caches]  # of recurrent layers, of a fixed size per slot
    per_token = sum(_per_token(each, limits.capacity) for each in caches)
    logits = manifest.engines["target"].contract["logits"]
    rows = limits.batch * (limits.num_draft_tokens + 1)
    rounds = (
        rows * manifest.vocab * BYTES[logits.dtype]
        + limits.batch * limits.num_draft_tokens * manifest.vocab * BYTES["float32"]
        + sum(prod(each.resolve({"batch": limits.batch})) * BYTES[each.dtype] for each in states)
    )
    left = max(0, int(memory * SHARE) - manifest.weights - rounds)
    tokens = left // per_token
    row = blocks_of(limits.capacity) * BLOCK_SIZE
    return Capacity(memory, manifest.weights, rounds, per_token, tokens, tokens // row)


def _caches(manifest: Manifest) -> list[Binding]:
    # The engine "context" writes into the draft's cache.
    contracts = [engine.contract for name, engine in manifest.engines.items() if name != "context"]
    return [each for contract in contracts for each in contract.inputs if each.name.startswith("past_")]


def _per_token(cache: Binding, row: int) -> int:
    """Return the bytes of one token in one cache binding."""
    size = prod(cache.resolve({"batch": 1, "blocks": 1})) * BYTES[cache.dtype]
    return size // (BLOCK_SIZE if "blocks" in cache.shape else row)
