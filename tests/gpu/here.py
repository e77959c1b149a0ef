"""The GPU of this machine."""

import torch

from tandemrt.engines.gpus import architectures_for, name_of
from tandemrt.plugins.kernels.compile import ARCHITECTURES


def architectures() -> tuple[str, ...]:
    """What to compile kernels for, so that this GPU runs them."""
    return architectures_for(name_of(torch.cuda.get_device_capability()), ARCHITECTURES)
