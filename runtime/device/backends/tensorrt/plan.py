"""Requirements on a TensorRT engine as plain values: sizes of calls, profiles, memory."""

import math
from collections.abc import Iterator, Mapping, Sequence

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineName, Limits
from tandemrt.engines.contract.calls import outermost
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.validation.errors import BackendUnavailable, BadBundle

Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]  # input -> least, best and largest shape


def choose_profile(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int | None:
    """Return the index of the profile that takes ``shapes`` and is tuned for the closest ones, or None.

    The distance is the number of doublings between a size and the tuned one, summed over all dimensions.
    """

    def distance(index: int) -> float:
        return sum(_distance(profiles[index][name][1], shape) for name, shape in shapes.items())

    fits = [i for i, profile in enumerate(profiles) if all(_within(profile[n], shape) for n, shape in shapes.items())]
    return min(fits, key=distance, default=None)


def require_profiles(engine: EngineName, contract: Contract, limits: Limits, profiles: Sequence[Profile]) -> None:
    """Raise BadBundle unless every call that the bundle's limits allow has a profile."""
    for sizes in outermost(engine, limits.batch, limits.num_draft_tokens, limits.prefill_chunk):
        shapes = {binding.name: binding.resolve(sizes) for binding in contract.inputs}
        if choose_profile(profiles, shapes) is None:
            asked = ", ".join(f"{symbol} {size}" for symbol, size in sizes.items())
            raise BadBundle(
                f"engine {engine!r}: a profile must take every call within the bundle's limits; none takes {asked} "
                f"(profiles: {'; '.join(map(_describe, profiles))}). Build the bundle again"
            )


def memory_needed(bundle: Bundle) -> dict[str, int]:
    """Bytes on the GPU that are known before engines are opened: engines (with weights) and caches, by name."""
    needed = {}
    for name, entry in bundle.manifest.engines.items():
        needed[f"engine {name}"] = bundle.path(name).stat().st_size
        if name in ("target", "draft") and (caches := sum(_cache_bytes(entry.contract, bundle.limits.batch))):
            needed[f"caches of {name}"] = caches
    return needed


def require_memory(needed: Mapping[str, int], free: int) -> None:
    """Raise BackendUnavailable unless ``needed`` (bytes by name) fits into ``free`` bytes."""
    if sum(needed.values()) > free:
        parts = ", ".join(f"{what} {_gib(size)}" for what, size in needed.items())
        raise BackendUnavailable(
            f"the GPU must have {_gib(sum(needed.values()))} of free memory for this bundle ({parts}); it has "
            f"{_gib(free)}. Free memory, or build with a smaller limits.batch or limits.length"
        )


def _within(profile: tuple[Shape, Shape, Shape], shape: Shape) -> bool:
    least, _, most = profile
    return len(shape) == len(least) and all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))


def _distance(best: Shape, shape: Shape) -> float:
    return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(best, shape, strict=True))


def _describe(profile: Profile) -> str:
    return ", ".join(
        f"{name} {list(least)} to {list(most)}"
        for name, (least, _, most) in profile.items()
        if not name.startswith("past_")
    )


def _cache_bytes(contract: Contract, slots: int) -> Iterator[int]:
    widths = {"float32": 4, "float16": 2, "bfloat16": 2}
    for _, source in contract.aliases:
        binding = contract[source]
        yield math.prod(binding.resolve({"batch": slots})) * widths[binding.dtype]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
