"""Options of onnxruntime sessions, and how a tensor is bound to one.

onnxruntime is imported lazily: it may be missing, and the caller then raises an error that says what needs it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tandemrt.engines.contract.dtypes import ONNX
from tandemrt.plugins.tensors import torch

if TYPE_CHECKING:
    import onnxruntime

_ENTRIES = {
    # Several sessions share the cores; spinning threads would block each other.
    "session.intra_op.allow_spinning": "0",
    # Dequantize constant weights once, when the graph loads, and not in every run.
    "session.disable_quant_qdq": "1",
}
_NOTHING = torch.zeros(1, dtype=torch.int64)  # IO binding needs an address, and an empty tensor has none


def session_options(
    *, threads: int | None = None, entries: Mapping[str, str] | None = None
) -> "onnxruntime.SessionOptions":
    """Return options with the session config ``entries`` and at most ``threads`` CPU threads (None: one per core)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only: the warnings do not help with generated graphs
    for key, value in {**_ENTRIES, **(entries or {})}.items():  # each key once: onnxruntime warns about a second value
        options.add_session_config_entry(key, value)
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the dtype's name in this project (engines/contract/dtypes.py)."""
    return str(tensor.dtype).removeprefix("torch.")


def place(tensor: torch.Tensor) -> tuple[str, int, int, list[int], int]:
    """Return the arguments that IO binding needs for a tensor: device, index, element type, shape, address."""
    device = tensor.device
    address = tensor.data_ptr() or _NOTHING.data_ptr()
    return device.type, device.index or 0, ONNX[dtype_name(tensor)], list(tensor.shape), address
