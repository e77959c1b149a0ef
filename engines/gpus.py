"""Which GPUs an engine was built for: the ``target`` of its entry in a manifest.

``sm_86+sm_120`` names compute capabilities; ``sm_80-up`` names one and all later ones.
"""

from collections.abc import Sequence

Capability = tuple[int, int]  # (8, 6) as torch.cuda.get_device_capability gives it


def target_of(capabilities: Sequence[str], *, and_later: bool = False) -> str:
    """Write compute capabilities, "8.6", as a target."""
    suffix = "-up" if and_later else ""
    return "+".join(f"sm_{capability.replace('.', '')}{suffix}" for capability in capabilities)


def covers(target: str, capability: Capability) -> bool:
    """Whether an engine built for ``target`` runs on a GPU of ``capability``. ``cuda`` covers all of them."""
    return target == "cuda" or any(_covers(part, capability) for part in target.split("+"))


def name_of(capability: Capability) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _covers(part: str, capability: Capability) -> bool:
    digits = part.removeprefix("sm_").removesuffix("-up")
    if not part.startswith("sm_") or not digits.isdigit():
        return False
    built_for = (int(digits[:-1]), int(digits[-1]))
    return capability >= built_for if part.endswith("-up") else capability == built_for
