"""Find the object of a device. A CPU needs no torch, so a GPU's module is imported for a GPU alone."""

from functools import cache
from importlib.util import find_spec

from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.device import Device


@cache
def device_of(device: torch.device) -> Device:
    """Return the object of a torch device."""
    if device.type == "cpu":
        return Device(device)
    from tandemrt.plugins.tensors.devices.cuda import CudaDevice

    return CudaDevice(device)


def gpus() -> list[Device]:
    """Return the GPUs that torch can use; none without torch."""
    if find_spec("torch") is None or not torch.cuda.is_available():
        return []
    return [device_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
