"""The GPUs that an engine was built for, as a manifest writes them, and the GPUs that kernels are compiled for.

``sm_86+sm_120`` names compute capabilities; ``sm_80-up`` names one and all later ones.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

Capability = tuple[int, int]  # (8, 6) is 8.6
KernelCapability = Literal["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
COMPUTE_CAPABILITIES: tuple[KernelCapability, ...] = get_args(KernelCapability)  # targets of our kernels
OLDEST_WITH_KERNELS: Capability = (8, 0)
FLOAT8_FROM: Capability = (8, 9)  # the first capability with float8


def built_for(capabilities: Sequence[str], *, and_later: bool = False) -> str:
    """Format compute capabilities such as "8.6" as a manifest does."""
    suffix = "-up" if and_later else ""
    return "+".join(f"sm_{capability.replace('.', '')}{suffix}" for capability in capabilities)


def covers(built_for: str, capability: Capability) -> bool:
    """Return whether an engine ``built_for`` these GPUs runs on ``capability``. ``cuda`` covers every GPU."""
    return built_for == "cuda" or any(
        capability >= first if and_later else capability == first for first, and_later in _parts(built_for)
    )


def capabilities_for(built_for: str, available: Sequence[str]) -> tuple[str, ...]:
    """Return the ``available`` capabilities ("8.6") to compile for, so that every GPU of ``built_for`` has kernels.

    A GPU runs the latest kernel that is not newer than itself: directly, or translated by the driver. GPUs older than
    all ``available`` ones have none.
    """
    ordered, wanted = sorted(available, key=parsed), set()
    for first, and_later in _parts(built_for):
        wanted |= set([c for c in ordered if parsed(c) <= first][-1:])
        wanted |= {c for c in ordered if and_later and parsed(c) > first}
    return tuple(c for c in ordered if c in wanted)


def name_of(capability: Capability) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def parsed(written: str) -> Capability:
    """Parse a compute capability such as "8.6"."""
    major, minor = written.split(".")
    return int(major), int(minor)


def _parts(built_for: str) -> Iterator[tuple[Capability, bool]]:
    """Yield each named capability, and whether it includes all later ones."""
    for part in built_for.split("+"):
        digits = part.removeprefix("sm_").removesuffix("-up")
        if part.startswith("sm_") and digits.isdigit():
            yield (int(digits[:-1]), int(digits[-1])), part.endswith("-up")
