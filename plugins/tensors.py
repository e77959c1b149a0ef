"""``torch`` for code that runs on every device: torch itself on a GPU, numpy on a CPU.

Importing torch takes more time and memory than all else that a bundle on a CPU needs. So code that a CPU bundle runs
takes ``torch`` from here: what such a bundle asks for is made of numpy (plugins/host_tensor.py) and accepted beside
torch's own tensors, and torch is imported with the first name, device or tensor that is none of a CPU's.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.host_tensor import CPU, HostDtype, HostTensor, array_of
from tandemrt.plugins.host_tensor import zeros as host_zeros

_DTYPES = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn"}
)

_FLOAT = HostDtype("torch.float32")


class _Torch:
    """The names of the module torch. Functions give a HostTensor for the CPU's device and for HostTensors."""

    Tensor = HostTensor
    dtype = HostDtype

    def __getattr__(self, name: str) -> Any:
        found = HostDtype(f"torch.{name}") if name in _DTYPES else getattr(_imported(), name)
        setattr(self, name, found)
        return found

    def device(self, kind: Any, index: int | None = None) -> Any:
        if isinstance(kind, str) and kind in ("cpu", "cpu:0"):
            return CPU
        return _imported().device(kind) if index is None else _imported().device(kind, index)

    def zeros(self, *shape: Any, dtype: Any = _FLOAT, device: Any = CPU, **how: Any) -> Any:
        if _elsewhere(device) or how.get("pin_memory"):
            return _imported().zeros(*shape, dtype=_real(dtype), device=device, **how)
        return host_zeros(*shape, dtype=str(dtype))

    def empty(self, *shape: Any, dtype: Any = _FLOAT, device: Any = CPU) -> Any:
        if _elsewhere(device):
            return _imported().empty(*shape, dtype=_real(dtype), device=device)
        return host_zeros(*shape, dtype=str(dtype))

    def zeros_like(self, tensor: Any) -> Any:
        if not isinstance(tensor, HostTensor):
            return _imported().zeros_like(tensor)
        return host_zeros(*tensor.shape, dtype=str(tensor.dtype))

    def arange(self, *bounds: int, device: Any = CPU) -> Any:
        """Int64."""
        if _elsewhere(device):
            return _imported().arange(*bounds, device=device)
        return HostTensor(np.arange(*bounds, dtype=np.int64))

    def tensor(self, values: Any, *, dtype: Any = None, device: Any = CPU, pin_memory: bool = False) -> Any:
        if _elsewhere(device) or pin_memory or not isinstance(dtype, HostDtype | None):
            return _imported().tensor(values, dtype=_real(dtype), device=device, pin_memory=pin_memory)
        array = np.array(values, dtype=dtype.numpy if dtype else None)
        return HostTensor(array if dtype or array.dtype != np.float64 else array.astype(np.float32))

    def add(self, first: Any, second: Any, *, out: Any) -> Any:
        if not isinstance(out, HostTensor):
            return _imported().add(first, second, out=out)
        np.add(array_of(first), array_of(second), out=out.numpy())
        return out

    def sub(self, first: Any, second: Any, *, out: Any) -> Any:
        if not isinstance(out, HostTensor):
            return _imported().sub(first, second, out=out)
        np.subtract(array_of(first), array_of(second), out=out.numpy())
        return out

    def mul(self, first: Any, second: Any, *, out: Any) -> Any:
        if not isinstance(out, HostTensor):
            return _imported().mul(first, second, out=out)
        np.multiply(array_of(first), array_of(second), out=out.numpy())
        return out

    def clamp(self, tensor: Any, *, min: Any = None, max: Any = None, out: Any) -> Any:  # noqa: A002
        if not isinstance(out, HostTensor):
            return _imported().clamp(tensor, min=min, max=max, out=out)
        np.clip(array_of(tensor), min, max, out=out.numpy(), casting="no")  # torch changes no dtype here either
        return out

    def cat(self, tensors: Any, dim: int = 0) -> Any:
        if not isinstance(tensors[0], HostTensor):
            return _imported().cat(tensors, dim)
        return HostTensor(np.concatenate([array_of(each) for each in tensors], dim))

    def index_select(self, tensor: Any, dim: int, index: Any, *, out: Any) -> Any:
        if not isinstance(out, HostTensor):
            return _imported().index_select(tensor, dim, index, out=out)
        return out.copy_(np.take(array_of(tensor), array_of(index), dim))

    def gather(self, tensor: Any, dim: int, index: Any, *, out: Any) -> Any:
        if not isinstance(out, HostTensor):
            return _imported().gather(tensor, dim, index, out=out)
        return out.copy_(np.take_along_axis(array_of(tensor), array_of(index), dim))


def viewed(tensor: Any, dtype: Any) -> Any:
    """The memory of ``tensor`` as elements of ``dtype``, which names one of torch's, with torch imported or not."""
    return tensor.view(dtype if isinstance(tensor, HostTensor) else _real(dtype))


def host_floats(tensor: Any) -> npt.NDArray[np.float32]:
    """The values of ``tensor``, on whatever device and of whatever dtype, in float32 on the host."""
    array = array_of(tensor) if isinstance(tensor, HostTensor) else tensor.cpu().float().numpy()
    return np.asarray(array, np.float32)


def _imported() -> Any:
    import torch

    return torch


def _elsewhere(device: Any) -> bool:
    return str(device).partition(":")[0] != "cpu"


def _real(dtype: Any) -> Any:
    return getattr(_imported(), dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


if TYPE_CHECKING:
    import torch as torch
else:
    torch = _Torch()
