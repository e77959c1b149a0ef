"""cuBLASLt matmuls with an explicit algorithm, which torch does not offer.

The library is the one that torch has loaded. Names are those of cuBLASLt's documentation
(https://docs.nvidia.com/cuda/cublas).
"""

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.engines.validation.extras import pip_install
from tandemrt.plugins.tensors.devices.lookup import device_of

WORKSPACE = 32 << 20  # bytes
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}  # cudaDataType_t
_COMPUTE_32F = 68  # CUBLAS_COMPUTE_32F
_TRANSA, _A_SCALE, _B_SCALE, _FAST_ACCUM = 3, 17, 18, 25  # CUBLASLT_MATMUL_DESC_…
_MAX_WORKSPACE, _REDUCTION_SCHEMES = 1, 3  # CUBLASLT_MATMUL_PREF_…
_NO_REDUCTION = 0  # CUBLASLT_REDUCTION_SCHEME_NONE: one block sums all inputs of an output
_NOT_SUPPORTED = 15  # CUBLAS_STATUS_NOT_SUPPORTED
_ONE, _ZERO = c_float(1), c_float(0)


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: how a matmul is computed, independent of its tensors."""

    _fields_ = (("data", c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Matmul:
    """rows [rows, inner] @ weight.T, weight [width, inner], into out [rows, width], sums in float32.

    ``run`` enqueues it by one of ``algorithms``. Capturable. Scales of float8 matmuls are 1. Tensors are contiguous,
    but ``out`` may be columns of a wider one.
    """

    def __init__(self, rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> None:
        (count, inner), width = rows.shape, len(weight)
        self._tensors = (rows, weight, out, workspace)
        self._handle = _handle(rows.device)
        self._description = _description(weight.dtype, rows.device)
        # The library is column-major: [width, count] = [inner, width].T @ [inner, count].
        self._weight = _layout(weight.dtype, inner, width)
        self._rows = _layout(rows.dtype, inner, count)
        self._matmul = _layout(out.dtype, width, count, out.stride(0))

    def algorithms(self, count: int, most: int) -> Iterator[Algorithm]:
        """Return up to ``most`` algorithms for ``count`` rows without split-K that also support this matmul.

        They are sorted by the speed that cuBLASLt expects for ``count`` rows. Raises RuntimeError if the library fails.
        """
        preference, results, num_results = _LibraryObject("MatmulPreference"), (_Heuristic * most)(), c_int()
        preference.set(_MAX_WORKSPACE, c_size_t(WORKSPACE))
        preference.set(_REDUCTION_SCHEMES, c_uint32(_NO_REDUCTION))
        rows, weight, out, _ = self._tensors
        width, inner = weight.shape
        out_layout = _layout(out.dtype, width, count, out.stride(0))
        layouts = (self._weight, _layout(rows.dtype, inner, count), out_layout, out_layout)
        name = "cublasLtMatmulAlgoGetHeuristic"
        choose = getattr(_library(), name)
        status = choose(self._handle, self._description, *layouts, preference, most, results, byref(num_results))
        if status == _NOT_SUPPORTED:
            return  # no algorithm exists
        _require_success(name, status)
        for result in results[: num_results.value]:
            if result.state == 0 and self.supports(result.algorithm):
                yield result.algorithm

    def supports(self, algorithm: Algorithm) -> bool:
        """Return whether the library can run this matmul by ``algorithm``."""
        checked = _Heuristic()
        layouts = (self._weight, self._rows, self._matmul, self._matmul)
        name = "cublasLtMatmulAlgoCheck"
        refused = getattr(_library(), name)(self._handle, self._description, *layouts, byref(algorithm), byref(checked))
        return not refused and checked.workspace <= WORKSPACE

    def run(self, algorithm: Algorithm) -> None:
        """Enqueue on torch's current stream. Raises RuntimeError if the library rejects it."""
        rows, weight, out, workspace = self._tensors
        _call(
            "cublasLtMatmul",
            self._handle,
            self._description,
            byref(_ONE),
            c_void_p(weight.data_ptr()),
            self._weight,
            c_void_p(rows.data_ptr()),
            self._rows,
            byref(_ZERO),
            c_void_p(out.data_ptr()),
            self._matmul,
            c_void_p(out.data_ptr()),
            self._matmul,
            byref(algorithm),
            c_void_p(workspace.data_ptr()),
            c_size_t(WORKSPACE),
            c_void_p(device_of(out.device).current_stream()),
        )


@dataclass(frozen=True)
class MatmulCall:
    """A matmul by one algorithm."""

    matmul: Matmul
    algorithm: Algorithm

    def run(self) -> None:
        """Enqueue on torch's current stream. Raises RuntimeError if the library rejects it."""
        self.matmul.run(self.algorithm)


class _LibraryObject:
    """An opaque object that the library creates and destroys."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        self._kind, self._library, self._as_parameter_ = kind, _library(), c_void_p()
        _call(f"cublasLt{kind}Create", byref(self._as_parameter_), *arguments)

    def __del__(self) -> None:
        getattr(self._library, f"cublasLt{self._kind}Destroy")(self._as_parameter_)

    def set(self, which: int, value: Any) -> None:
        """Set an attribute of the object."""
        _call(f"cublasLt{self._kind}SetAttribute", self, which, byref(value), c_size_t(ctypes.sizeof(value)))


@cache  # a decoder binds thousands of matmuls of few shapes
def _description(dtype: torch.dtype, device: torch.device) -> _LibraryObject:
    description = _LibraryObject("MatmulDesc", _COMPUTE_32F, _TYPES[torch.float32])
    description.set(_TRANSA, c_int32(1))
    if dtype == torch.float8_e4m3fn:
        for side in (_A_SCALE, _B_SCALE):
            description.set(side, c_void_p(_scale_of_one(device).data_ptr()))
        description.set(_FAST_ACCUM, c_int8(0))
    return description


@cache
def _scale_of_one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, dtype=torch.float32, device=device)


@lru_cache(maxsize=4096)
def _layout(dtype: torch.dtype, rows: int, columns: int, pitch: int | None = None) -> _LibraryObject:
    """Describe a matrix; ``pitch``: elements from column to column, by default none lies between them."""
    return _LibraryObject("MatrixLayout", _TYPES[dtype], c_uint64(rows), c_uint64(columns), c_int64(pitch or rows))


@cache
def _library() -> ctypes.CDLL:
    """Load the library. Raises BackendUnavailable if it is missing."""
    name = f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        return ctypes.CDLL(name)  # torch has loaded it already
    except OSError as error:
        raise BackendUnavailable(
            f"matmuls need {name}, which torch for CUDA brings; loading it failed: {error}; {pip_install('cuda')}"
        ) from error


def library_version() -> int:
    """Return the version of the library. Raises BackendUnavailable if it is missing."""
    return int(_library().cublasLtGetVersion())


@cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    with device_of(device).on_device():
        _call("cublasLtCreate", byref(handle))
    return handle


def _call(name: str, *arguments: Any) -> None:
    _require_success(name, getattr(_library(), name)(*arguments))


def _require_success(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} failed with status {status} of cublasStatus_t")
