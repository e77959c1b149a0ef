"""Paged attention calls on a CUDA device, compared with the reference."""

import torch

from tandemrt.plugins.kernels.attention import AttentionLauncher
from tandemrt.plugins.kernels.attention_workspace import AttentionWorkspace
from tandemrt.plugins.kernels.cudnn_attention import KEYS, serves
from tests.engine.attention_cases import assert_close, expected, tolerance
from tests.engine.implementation_cases import to_numpy, to_torch

PACKED = {
    "one run": [(0, 200)],
    "ragged": [(0, 1), (63, 1), (64, 64), (5, 0), (129, 190), (700, 17)],
    "many": [(37 * i % 300, 1 + 11 * i % 50) for i in range(70)],
    "empty": [(0, 0), (9, 0)],
    "far": [(1000, 150), (639, 1), (640, 2), (0, 3)],
}


def on_device(tensors):
    return {name: None if array is None else to_torch(array).cuda() for name, array in tensors.items()}


def bind(context, tensors, attributes, splits=None):
    """Return the launcher for tensors on the device, and ``mixed`` followed by memory that must stay unchanged."""
    tokens, width = len(tensors["qkv"]), attributes["heads"] * tensors["key_cache"].shape[-1]
    room = torch.full((tokens * width + 256,), 77.0, dtype=tensors["qkv"].dtype, device="cuda")
    mixed = room[:-256].view(tokens, width)
    launcher = AttentionLauncher(context, *tensors.values(), mixed, splits=splits, **attributes)
    return launcher, mixed, room[-256:]


def check(context, tensors, attributes, splits=None, near=None):
    """Assert that the kernels equal the reference to ``near``; None: the tolerance of the dtype."""
    on_gpu = on_device(tensors)
    launcher, mixed, after = bind(context, on_gpu, attributes, splits)
    for workspace in (kept for kept in context._cached.values() if isinstance(kept, AttentionWorkspace)):
        workspace._converted.fill_(0xFF)  # NaN in any dtype
    launcher.run()
    results = [to_numpy(each) for each in (mixed, on_gpu["key_cache"], on_gpu["value_cache"])]
    positions = on_gpu["prompt_table"].shape[1] * on_gpu["key_cache"].shape[2]
    whole = on_gpu["key_cache"].dtype == on_gpu["qkv"].dtype
    form = (on_gpu["qkv"].dtype, on_gpu["key_cache"].shape[-1], positions)
    cleared = KEYS if whole and serves(*form, sinks=on_gpu["sinks"] is not None) else 0
    near = tolerance(tensors["qkv"].dtype) if near is None else near
    assert_close(results, expected(tensors, attributes), tensors, near, cleared=cleared)
    assert (after == 77.0).all()
