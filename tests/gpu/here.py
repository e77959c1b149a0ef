"""The GPU of this machine."""

import torch

from tandemrt.engines.gpus import COMPUTE_CAPABILITIES, capabilities_for, name_of


def compute_capabilities() -> tuple[str, ...]:
    """What to compile kernels for, so that this GPU runs them."""
    return capabilities_for(name_of(torch.cuda.get_device_capability()), COMPUTE_CAPABILITIES)
