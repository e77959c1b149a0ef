"""CPU tensors without torch: numpy arrays with the interface of plugins/tensors/protocol.py."""

import mmap
from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any

import numpy as np

_HUGE = 1 << 22  # bytes from which on numpy asks for huge pages


class HostDtype(str):
    """A torch dtype by name, such as ``torch.float32``, without importing torch."""

    __slots__ = ()

    @classmethod
    @cache  # numpy takes long for a name, and a call binds a hundred tensors
    def of(cls, dtype: "np.dtype[Any]") -> "HostDtype":
        return cls(f"torch.{dtype}")

    @property
    def numpy(self) -> "np.dtype[Any]":
        """The dtype in numpy, or in ml_dtypes if numpy has none."""
        name: Any = self.removeprefix("torch.")
        if name in ("bfloat16", "float8_e4m3fn"):
            import ml_dtypes

            name = getattr(ml_dtypes, name)
        dtype: np.dtype[Any] = np.dtype(name)
        return dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.numpy.itemsize


class HostDevice(str):
    """The CPU device, without importing torch; torch accepts it as ``torch.device("cpu")``."""

    __slots__ = ()
    type = "cpu"
    index: int | None = None  # type: ignore[assignment]  # as torch.device has it, not as str.index

    def __eq__(self, other: object) -> bool:
        return getattr(other, "type", other) == self.type

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.type)


CPU = HostDevice("cpu")


class HostTensor:
    """A numpy array with torch's method names. Slices and views share its memory."""

    __slots__ = ("_array",)
    device = CPU

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    @property
    def dtype(self) -> HostDtype:
        return HostDtype.of(self._array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def T(self) -> "HostTensor":  # noqa: N802
        return HostTensor(self._array.T)

    def dim(self) -> int:
        return self._array.ndim

    def numel(self) -> int:
        return self._array.size

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self._array.ctypes.data

    def is_contiguous(self) -> bool:
        return self._array.flags.c_contiguous

    def is_floating_point(self) -> bool:
        return self._array.dtype.kind not in "biu"

    def numpy(self) -> np.ndarray:
        """The array itself."""
        return self._array

    def cpu(self) -> "HostTensor":
        return self

    def clone(self) -> "HostTensor":
        return HostTensor(self._array.copy())

    def tolist(self) -> Any:
        return self._array.tolist()

    def any(self) -> bool:
        return bool(self._array.any())

    def item(self) -> Any:
        return self._array.item()

    def view(self, *shape: Any) -> "HostTensor":
        """Return the same memory in ``shape``, or as elements of another dtype."""
        if len(shape) == 1 and isinstance(shape[0], str):
            return HostTensor(self._array.view(HostDtype(shape[0]).numpy))
        viewed = self._array.reshape(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
        if not np.may_share_memory(viewed, self._array) and viewed.size:
            raise ValueError(f"view: {self.shape} does not lie in memory as {shape} would")
        return HostTensor(viewed)

    def reshape(self, *shape: int) -> "HostTensor":
        return HostTensor(self._array.reshape(shape))

    def repeat(self, *times: int) -> "HostTensor":
        return HostTensor(np.tile(self._array, times))

    def new_tensor(self, values: Any) -> "HostTensor":
        return HostTensor(np.array(values, dtype=self._array.dtype))

    def to(self, device: Any) -> Any:
        """Move to a device. Not to a dtype: a torch tensor would not take the same object."""
        return self if device == CPU else self._of_torch().to(device)

    def _of_torch(self) -> Any:
        import torch

        if self._array.dtype.kind != "V":  # numpy reports ml_dtypes as void, and torch cannot read them
            return torch.from_numpy(self._array)
        bits = self._array.view(f"int{8 * self._array.itemsize}")
        return torch.from_numpy(bits).view(getattr(torch, str(self._array.dtype)))

    def copy_(self, source: Any, non_blocking: bool = False) -> "HostTensor":  # noqa: ARG002  # as torch has it
        np.copyto(self._array, array_of(source), casting="unsafe")
        return self

    def index_copy_(self, dim: int, index: Any, source: Any) -> "HostTensor":
        self._array[(slice(None),) * dim + (array_of(index),)] = array_of(source)
        return self

    def fill_(self, value: float) -> "HostTensor":
        self._array.fill(value)
        return self

    def zero_(self) -> "HostTensor":
        self._array.fill(0)
        return self

    def add_(self, other: Any) -> "HostTensor":
        np.add(self._array, array_of(other), out=self._array)
        return self

    def clamp_(self, min: float | None = None, max: float | None = None) -> "HostTensor":  # noqa: A002
        np.clip(self._array, min, max, out=self._array)
        return self

    def __getitem__(self, index: Any) -> "HostTensor":
        # With a trailing ellipsis, an index that leaves one element is still a view.
        index = index if isinstance(index, tuple) else (index,)
        return HostTensor(self._array[index if ... in index else (*index, ...)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self._array[index] = array_of(value)

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator["HostTensor"]:
        return (self[at] for at in range(len(self)))

    def __add__(self, other: Any) -> "HostTensor":
        return HostTensor(self._array + array_of(other))

    def __mul__(self, other: Any) -> "HostTensor":
        return HostTensor(self._array * array_of(other))

    def __sub__(self, other: Any) -> "HostTensor":
        return HostTensor(self._array - array_of(other))

    def __rsub__(self, other: Any) -> "HostTensor":
        return HostTensor(array_of(other) - self._array)

    def __neg__(self) -> "HostTensor":
        return HostTensor(-self._array)

    __radd__ = __add__
    __rmul__ = __mul__

    def __int__(self) -> int:
        return int(self._array)

    def __float__(self) -> float:
        return float(self._array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array, dtype=dtype, copy=copy)

    def __dlpack__(self, **how: Any) -> Any:
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __repr__(self) -> str:
        return f"HostTensor({self._array!r})"


def array_of(value: Any) -> Any:
    """Return the array of a HostTensor or of a torch tensor on a CPU, and any other value unchanged."""
    if isinstance(value, HostTensor):
        return value.numpy()
    return np.asarray(value) if hasattr(value, "__array__") else value


def zeros(*shape: Any, dtype: str = "torch.float32") -> HostTensor:
    """Return zeros. The operating system allocates the memory on first write, page by page."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    kind, count = HostDtype(dtype).numpy, prod(sizes)
    if count * kind.itemsize < _HUGE or not hasattr(mmap, "MAP_PRIVATE"):
        return HostTensor(np.zeros(count, kind).reshape(sizes))
    # numpy asks for pages of 2 MB, and a row of a cache would take all of one for its first token.
    memory = mmap.mmap(-1, count * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return HostTensor(np.frombuffer(memory, kind).reshape(sizes))
