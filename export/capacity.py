"""How much text a GPU's memory holds of a bundle, from its manifest alone."""

import re
from dataclasses import dataclass
from math import prod

from tandemrt.engines.binding import Binding
from tandemrt.engines.contract import BLOCK_SIZE, blocks_of
from tandemrt.engines.dtypes import BYTES
from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.engines.manifest import Manifest

SHARE = 0.9  # of a GPU's memory; the rest is for CUDA itself and for values between steps, which are not counted
_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Capacity:
    """What fits ``SHARE`` of ``memory``. Sizes are bytes.

    Attributes:
        rounds: logits of a full round, and the probabilities that drafts were drawn from.
        token: its keys and values, in all models.
        tokens: that fit all caches together.
        requests: of the bundle's full length that fit.
    """

    memory: int
    weights: int
    rounds: int
    token: int
    tokens: int
    requests: int


def memory_from_text(text: str) -> int:
    """Read ``80GB``, ``24GiB``, ``512MB``. Raises BadRequest."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(MB|GB|MiB|GiB)", text.strip())
    if found is None or not float(found[1]):
        raise BadRequest(f"--gpu: must be a memory such as 80GB or 24GiB, received {quoted(text)}")
    return int(float(found[1]) * _UNITS[found[2]])


def fitting(manifest: Manifest, memory: int) -> Capacity:
    """What fits a GPU of ``memory`` bytes, whatever cache the bundle asks for."""
    limits = manifest.limits
    per_token = sum(_per_token(each, limits.capacity) for each in _caches(manifest))
    logits = manifest.engines["target"].contract["logits"]
    rows = limits.batch * (limits.window + 1)
    rounds = (
        rows * manifest.vocab * BYTES[logits.dtype] + limits.batch * limits.window * manifest.vocab * BYTES["float32"]
    )
    left = max(0, int(memory * SHARE) - manifest.weights - rounds)
    tokens = left // per_token
    row = blocks_of(limits.capacity) * BLOCK_SIZE
    return Capacity(memory, manifest.weights, rounds, per_token, tokens, tokens // row)


def _caches(manifest: Manifest) -> list[Binding]:
    # What writes a draft's context writes the draft's cache.
    contracts = [engine.contract for name, engine in manifest.engines.items() if name != "context"]
    return [each for contract in contracts for each in contract.inputs if each.name.startswith("past_")]


def _per_token(cache: Binding, row: int) -> int:
    """Bytes that a token takes in one of the caches, whose rows or blocks hold many."""
    size = prod(cache.resolve({"batch": 1, "blocks": 1})) * BYTES[cache.dtype]
    return size // (BLOCK_SIZE if "blocks" in cache.shape else row)
