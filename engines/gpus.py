"""Which GPUs an engine was built for: the ``target`` of its entry in a manifest.

``sm_86+sm_120`` names compute capabilities; ``sm_80-up`` names one and all later ones.
"""

from collections.abc import Iterator, Sequence

Capability = tuple[int, int]  # (8, 6) as torch.cuda.get_device_capability gives it
OLDEST_WITH_KERNELS: Capability = (8, 0)  # that our own kernels run on


def target_of(capabilities: Sequence[str], *, and_later: bool = False) -> str:
    """Write compute capabilities, "8.6", as a target."""
    suffix = "-up" if and_later else ""
    return "+".join(f"sm_{capability.replace('.', '')}{suffix}" for capability in capabilities)


def covers(target: str, capability: Capability) -> bool:
    """Whether an engine built for ``target`` runs on a GPU of ``capability``. ``cuda`` covers all of them."""
    return target == "cuda" or any(
        capability >= first if and_later else capability == first for first, and_later in _parts(target)
    )


def architectures_for(target: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return which architectures of ``known``, "8.6", kernels must be compiled for to run on every GPU of ``target``.

    A GPU runs the latest one that is not later than itself: as it is, or translated by the driver. GPUs older than all
    of them have none.
    """
    ordered, wanted = sorted(known, key=_capability), set()
    for first, and_later in _parts(target):
        wanted |= set([a for a in ordered if _capability(a) <= first][-1:])
        wanted |= {a for a in ordered if and_later and _capability(a) > first}
    return tuple(a for a in ordered if a in wanted)


def name_of(capability: Capability) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _parts(target: str) -> Iterator[tuple[Capability, bool]]:
    """The capabilities that ``target`` names, and whether all later ones are meant too."""
    for part in target.split("+"):
        digits = part.removeprefix("sm_").removesuffix("-up")
        if part.startswith("sm_") and digits.isdigit():
            yield (int(digits[:-1]), int(digits[-1])), part.endswith("-up")


def _capability(written: str) -> Capability:
    major, minor = written.split(".")
    return int(major), int(minor)
