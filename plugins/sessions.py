"""What every session of onnxruntime has in common: its options, and how a tensor is bound to it.

onnxruntime itself is imported by who opens one: it may be missing, and each says then what for it is needed.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tandemrt.engines.dtypes import ONNX
from tandemrt.plugins.tensors import torch

if TYPE_CHECKING:
    import onnxruntime

_NOTHING = torch.zeros(1, dtype=torch.int64)  # where an empty tensor lies: it has no address, and IO binding wants one


def session_options(
    *, threads: int | None = None, entries: Mapping[str, str] | None = None
) -> "onnxruntime.SessionOptions":
    """Return options with the session config ``entries`` and at most ``threads`` CPU threads (None: one per core)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors: the rest is advice on graphs that we do not write by hand
    # Several sessions share the cores: threads that spin while they wait would take them from one another.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Weights that are dequantized in the graph are so once, when it loads, and not in every run.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype as the project says it (engines/dtypes.py)."""
    return str(tensor.dtype).removeprefix("torch.")


def place(tensor: torch.Tensor) -> tuple[str, int, int, list[int], int]:
    """What IO binding wants to know of a tensor."""
    device = tensor.device
    address = tensor.data_ptr() or _NOTHING.data_ptr()
    return device.type, device.index or 0, ONNX[dtype_name(tensor)], list(tensor.shape), address
