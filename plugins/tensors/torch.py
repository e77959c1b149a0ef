"""``torch`` for code that runs on every device: torch itself on a GPU, numpy on a CPU.

Importing torch takes more time and memory than the rest of a CPU bundle. Shared code therefore imports this module as
``torch``. Functions here return a HostTensor for the CPU device and for HostTensors, and call torch otherwise. torch is
imported when a name, device or tensor first needs a GPU. Type checkers see the protocol Tensor for both.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from tandemrt.plugins.tensors.dtypes import dtype_of_torch
from tandemrt.plugins.tensors.host_tensor import CPU, HostDtype, HostTensor, array_of
from tandemrt.plugins.tensors.host_tensor import zeros as host_zeros
from tandemrt.plugins.tensors.protocol import Tensor as Tensor

if TYPE_CHECKING:  # the other names of torch that shared code may use
    from torch import __version__ as __version__
    from torch import cuda as cuda
    from torch import device as device
    from torch import dtype as dtype
    from torch import equal as equal
    from torch import float32 as float32
    from torch import from_numpy as from_numpy
    from torch import inference_mode as inference_mode
    from torch import int32 as int32
    from torch import int64 as int64
    from torch import uint8 as uint8
else:
    dtype = HostDtype

    def device(kind, index=None):
        """Return the CPU's device without torch, and torch's device for any other ``kind``."""
        if isinstance(kind, str) and kind in ("cpu", "cpu:0"):
            return CPU
        import torch

        return torch.device(kind) if index is None else torch.device(kind, index)

    def __getattr__(name):
        import_from_torch = name not in _DTYPES
        if import_from_torch:
            import torch
        value = getattr(torch, name) if import_from_torch else HostDtype(f"torch.{name}")
        globals()[name] = value
        return value


_DTYPES = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn"}
)
_FLOAT32 = HostDtype("torch.float32")


def zeros(*shape: Any, dtype: Any = _FLOAT32, device: Any = CPU, pin_memory: bool = False) -> Tensor:
    """Return zeros. On a CPU the operating system allocates the memory on first write."""
    if _on_gpu(device) or pin_memory:
        import torch

        return torch.zeros(*shape, dtype=dtype_of_torch(dtype), device=device, pin_memory=pin_memory)
    return host_zeros(*shape, dtype=str(dtype))


def empty(*shape: Any, dtype: Any = _FLOAT32, device: Any = CPU) -> Tensor:
    """Return memory with any contents."""
    if _on_gpu(device):
        import torch

        return torch.empty(*shape, dtype=dtype_of_torch(dtype), device=device)
    return host_zeros(*shape, dtype=str(dtype))


def zeros_like(tensor: Any) -> Tensor:
    """Return zeros of the shape, dtype and device of ``tensor``."""
    if not isinstance(tensor, HostTensor):
        import torch

        return torch.zeros_like(tensor)
    return host_zeros(*tensor.shape, dtype=str(tensor.dtype))


def arange(*bounds: int, device: Any = CPU) -> Tensor:
    """Return int64 values; ``bounds`` as in range."""
    if _on_gpu(device):
        import torch

        return torch.arange(*bounds, device=device)
    return HostTensor(np.arange(*bounds, dtype=np.int64))


def tensor(values: Any, *, dtype: Any = None, device: Any = CPU, pin_memory: bool = False) -> Tensor:
    """Return ``values`` as a tensor; floats are float32 unless ``dtype`` differs."""
    if _on_gpu(device) or pin_memory or not isinstance(dtype, HostDtype | None):
        import torch

        return torch.tensor(values, dtype=dtype_of_torch(dtype), device=device, pin_memory=pin_memory)
    array = np.array(values, dtype=dtype.numpy if dtype else None)
    return HostTensor(array if dtype or array.dtype != np.float64 else array.astype(np.float32))


def add(first: Any, second: Any, *, out: Any) -> Tensor:
    """Write first + second into ``out``."""
    if not isinstance(out, HostTensor):
        import torch

        return torch.add(first, second, out=out)
    np.add(array_of(first), array_of(second), out=out.numpy())
    return out


def sub(first: Any, second: Any, *, out: Any) -> Tensor:
    """Write first - second into ``out``."""
    if not isinstance(out, HostTensor):
        import torch

        return torch.sub(first, second, out=out)
    np.subtract(array_of(first), array_of(second), out=out.numpy())
    return out


def mul(first: Any, second: Any, *, out: Any) -> Tensor:
    """Write first * second into ``out``."""
    if not isinstance(out, HostTensor):
        import torch

        return torch.mul(first, second, out=out)
    np.multiply(array_of(first), array_of(second), out=out.numpy())
    return out


def clamp(tensor: Any, *, min: Any = None, max: Any = None, out: Any) -> Tensor:  # noqa: A002
    """Write ``tensor`` within its bounds into ``out``, which has the same dtype."""
    if not isinstance(out, HostTensor):
        import torch

        return torch.clamp(tensor, min=min, max=max, out=out)
    np.clip(array_of(tensor), min, max, out=out.numpy(), casting="no")  # torch does not convert dtypes here either
    return out


def cat(tensors: Any, dim: int = 0) -> Tensor:
    """Return ``tensors`` joined along ``dim``."""
    if not isinstance(tensors[0], HostTensor):
        import torch

        return torch.cat(tensors, dim)
    return HostTensor(np.concatenate([array_of(each) for each in tensors], dim))


def index_select(tensor: Any, dim: int, index: Any, *, out: Any) -> Tensor:
    """Write the entries ``index`` of ``tensor`` along ``dim`` into ``out``."""
    if not isinstance(out, HostTensor):
        import torch

        return torch.index_select(tensor, dim, index, out=out)
    return out.copy_(np.take(array_of(tensor), array_of(index), dim))


def gather(tensor: Any, dim: int, index: Any, *, out: Any) -> Tensor:
    """Write the entries of ``tensor`` that ``index`` picks along ``dim``, per position, into ``out``."""
    if not isinstance(out, HostTensor):
        import torch

        return torch.gather(tensor, dim, index, out=out)
    return out.copy_(np.take_along_axis(array_of(tensor), array_of(index), dim))


def raise_entries(tensor: Any, index: Any, values: Any) -> None:
    """Raise the entries ``index`` of the vector ``tensor`` to at least ``values``; an index may come several times."""
    if isinstance(tensor, HostTensor):
        np.maximum.at(tensor.numpy(), array_of(index), array_of(values))
    else:
        tensor.scatter_reduce_(0, index, values, "amax")


def _on_gpu(device: Any) -> bool:
    return str(device).partition(":")[0] != "cpu"
