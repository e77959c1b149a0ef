"""Create the CUDA context of a GPU early: that takes half a second, in which Python can do other work."""

import ctypes
from contextlib import suppress
from threading import Thread


def create_context(device: str) -> None:
    """Begin to create the primary context of ``device``, such as cuda:1, in a thread. Does nothing for a CPU.

    torch, whose import takes long, uses that context later. It also reports what fails here.
    """
    kind, _, index = device.partition(":")
    if kind == "cuda":
        with suppress(RuntimeError):  # no thread could start
            Thread(target=_create, args=(int(index or 0),), name="tandemrt-context").start()


def _create(index: int) -> None:
    with suppress(OSError, AttributeError):  # there is no driver
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
