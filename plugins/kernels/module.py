"""Load compiled kernels for a device and launch them on torch's current stream."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tandemrt.engines.contract.dtypes import KERNEL_SUFFIX
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.engines.validation.extras import pip_install
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.tensors.devices.lookup import device_of

try:
    from cuda.bindings import driver
    from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch
except ImportError as error:
    raise BackendUnavailable(
        f"cuda-core is not installed ({error}); it is needed to launch CUDA kernels: {pip_install('kernels')}"
    ) from error

Grid = tuple[int, int, int]
Tensors = Mapping[str, torch.Tensor]  # as in plugins/operators/launch.py, on a CUDA device
HOPPER = 90  # the first architecture with thread block clusters and programmatic dependent launch


class KernelModule:
    """The kernels of one ``NAME.cu`` on one device."""

    def __init__(self, code: "ObjectCode", device: torch.device, architecture: int) -> None:
        self.device = device
        self.architecture = architecture  # of the code, 90 for sm_90; the device's may be higher
        self.shared_memory = _most_shared_memory(device)  # bytes per block
        self.sm_count = device_of(device).processors
        self._code = code
        self._kernels: dict[str, Any] = {}
        self._allowed: dict[str, int] = {}  # bytes of dynamic shared memory

    @classmethod
    def open(cls, folder: Path, name: str, device: torch.device | str = "cuda") -> "KernelModule":
        """Load ``folder/NAME.sm_XY.cubin`` for ``device``, or else let the driver compile ``folder/NAME.ptx``.

        Raises BackendUnavailable if neither fits the device's compute capability.
        """
        device = device_of(torch.device(device)).numbered()
        gpu = device_of(device)
        gpu.synchronize()  # creates torch's context, which the kernels share
        Device(device.index).set_current()
        major, minor = gpu.capability
        cubin = _fitting(folder, name, major, minor)
        if cubin is not None:
            return cls(ObjectCode.from_cubin(cubin.read_bytes()), device, int(cubin.suffixes[-2].removeprefix(".sm_")))
        ptx = folder / f"{name}.ptx"
        if ptx.is_file() and (virtual := _virtual_architecture(ptx)) <= 10 * major + minor:
            return cls(ObjectCode.from_ptx(ptx.read_bytes()), device, virtual)
        offered = sorted(path.name for path in (*folder.glob(f"{name}.*.cubin"), *folder.glob(f"{name}.ptx")))
        raise BackendUnavailable(
            f"{folder}: no {name} kernels for {gpu.name} (sm_{major}{minor}), "
            f"there are {', '.join(offered) or 'none'}; add its compute capability to the recipe and build again"
        )

    @classmethod
    def of(cls, context: Context, name: str) -> "KernelModule":
        """Return the kernels of ``NAME.cu`` in the context's folder, loaded once per context.

        Raises BackendUnavailable if none fits the device.
        """
        assert context.kernels is not None
        folder = context.kernels
        return context.get_or_create(("module", name), lambda: cls.open(folder, name, context.device))

    def kernel(self, name: str, *, shared: int = 0) -> Any:
        """Return the kernel ``name``, allowed ``shared`` bytes of dynamic shared memory per block.

        Raises BackendUnavailable if it was not compiled, or if the device has less shared memory.
        """
        if name not in self._kernels:
            self._kernels[name] = self._find(name)
        if shared > self._allowed.get(name, 0):  # never lower the limit: other launches need theirs
            self._allow(name, shared)
        return self._kernels[name]

    def _find(self, name: str) -> Any:
        status, _ = driver.cuLibraryGetKernel(self._code.handle, name.encode())
        if status == driver.CUresult.CUDA_ERROR_NOT_FOUND:
            raise BackendUnavailable(
                f"kernel {name} is not in the bundle, which contains kernels only for the dtypes and head sizes of its "
                "models; build it again with this version"
            )
        return self._code.get_kernel(name)

    def _allow(self, name: str, shared: int) -> None:
        # Up to 48 KiB, static shared memory included, are allowed by default.
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        kernel, device = self._kernels[name].handle, driver.CUdevice(self.device.index)
        (status,) = driver.cuKernelSetAttribute(attribute, shared, kernel, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise BackendUnavailable(f"{name}: {shared} bytes of shared memory per block refused: {status.name}")
        self._allowed[name] = shared


class Launch:
    """One bound launch: kernel, grid, block and arguments are fixed; the contents of the tensors may change.

    Arguments are tensors (passed as addresses), None (a null pointer), and numpy scalars of the parameter's dtype.
    ``shared``: bytes of dynamic shared memory per block. ``cluster``: the number of blocks along the first axis of
    ``grid``, a divisor of it, that read each other's shared memory. ``early``: the kernel may begin before the previous
    kernel has ended, and waits for it where necessary (early.cuh). Both need code for HOPPER or later.
    """

    def __init__(
        self,
        kernel: Any,
        grid: Grid,
        block: Grid,
        *arguments: Any,
        shared: int = 0,
        cluster: int = 1,
        early: bool = False,
    ) -> None:
        self._kernel = kernel
        self._config = LaunchConfig(
            grid=(grid[0] // cluster, *grid[1:]),  # counted in clusters
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            block=block,
            shmem_size=shared,
            programmatic_stream_serialization=early,
        )
        self._keep = arguments  # the kernel gets addresses only
        self._arguments = tuple(_argument(argument) for argument in arguments)

    def run(self, stream: "Stream") -> None:
        """Enqueue the kernel."""
        launch(stream, self._config, self._kernel, *self._arguments)


def current_stream(device: torch.device) -> "Stream":
    """Return torch's current stream on ``device``, for :meth:`Launch.run`."""
    return _stream(device_of(device).current_stream())


@lru_cache(maxsize=64)
def _stream(handle: int) -> "Stream":
    return Stream.from_handle(handle)


def run_in_order(launches: Iterable[Launch], device: torch.device) -> None:
    """Enqueue ``launches`` on torch's current stream of ``device``."""
    stream = current_stream(device)
    for each in launches:
        each.run(stream)


def suffix(tensor: torch.Tensor) -> str:
    """Return the name suffix of kernels that compute in the dtype of ``tensor``. Raises ValueError without one."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in KERNEL_SUFFIX:
        raise ValueError(f"dtype: one of {', '.join(KERNEL_SUFFIX)} is needed, got {dtype}")
    return KERNEL_SUFFIX[dtype]


def _argument(argument: Any) -> Any:
    if argument is None:
        return 0
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def _most_shared_memory(device: torch.device) -> int:
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    _, size = driver.cuDeviceGetAttribute(attribute, driver.CUdevice(device.index))
    return int(size)


def _fitting(folder: Path, name: str, major: int, minor: int) -> Path | None:
    """Return the cubin of the same major architecture with the highest minor one that the device supports."""
    for candidate in range(minor, -1, -1):
        path = folder / f"{name}.sm_{major}{candidate}.cubin"
        if path.is_file():
            return path
    return None


def _virtual_architecture(ptx: Path) -> int:
    text = ptx.read_text()
    return int(text.partition(".target sm_")[2].partition("\n")[0].partition(",")[0])
