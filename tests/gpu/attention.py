"""Calls of attention over a paged cache on a CUDA device, held to the definition."""

import torch

from tandemrt.plugins.kernels.attention import AttentionLauncher
from tandemrt.plugins.kernels.attention_workspace import Workspace
from tandemrt.plugins.kernels.cudnn_attention import KEYS, serves
from tests.engine.attention_cases import assert_close, expected, tolerance
from tests.engine.face_cases import to_numpy, to_torch

PACKED = {
    "one run": [(0, 200)],
    "ragged": [(0, 1), (63, 1), (64, 64), (5, 0), (129, 190), (700, 17)],
    "many": [(37 * i % 300, 1 + 11 * i % 50) for i in range(70)],
    "empty": [(0, 0), (9, 0)],
    "far": [(1000, 150), (639, 1), (640, 2), (0, 3)],
}


def on_device(tensors):
    return {name: None if array is None else to_torch(array).cuda() for name, array in tensors.items()}


def bind(context, tensors, given, splits=None):
    """The launcher for tensors on the device, and ``mixed`` with room behind it that must stay as it is."""
    tokens, width = len(tensors["qkv"]), given["heads"] * tensors["key_cache"].shape[-1]
    room = torch.full((tokens * width + 256,), 77.0, dtype=tensors["qkv"].dtype, device="cuda")
    mixed = room[:-256].view(tokens, width)
    launcher = AttentionLauncher(context, *tensors.values(), mixed, splits=splits, **given)
    return launcher, mixed, room[-256:]


def check(context, tensors, given, splits=None, near=None):
    """Assert that the kernels give what the definition gives, to ``near``; None: what the dtype allows."""
    held = on_device(tensors)
    launcher, mixed, behind = bind(context, held, given, splits)
    for workspace in (kept for kept in context._kept.values() if isinstance(kept, Workspace)):
        workspace._widened.fill_(0xFF)  # NaN, whatever is computed in
    launcher.run()
    found = [to_numpy(each) for each in (mixed, held["key_cache"], held["value_cache"])]
    positions = held["prompt_table"].shape[1] * held["key_cache"].shape[2]
    whole = held["key_cache"].dtype == held["qkv"].dtype
    cleared = KEYS if whole and serves(held["qkv"].dtype, held["key_cache"].shape[-1], positions) else 0
    near = tolerance(tensors["qkv"].dtype) if near is None else near
    assert_close(found, expected(tensors, given), tensors, near, cleared=cleared)
    assert (behind == 77.0).all()
