"""An operator whose kernels a GPU cannot run is rejected with the way that this GPU has."""

from pathlib import Path

import pytest
import torch

from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins import implementations
from tandemrt.plugins.operators.launch import Context


@pytest.mark.parametrize(
    ("operator", "capability", "way"),
    [
        ("window_attention", (7, 5), r"8\.0 or later, .* has 7\.5; build the bundle with backend\.cache = 'linear'"),
        ("scaled_matmul", (7, 5), r"8\.9 or later, .* has 7\.5; build the bundle with backend\.cache = 'linear'"),
        ("scaled_matmul", (8, 6), r"8\.9 or later, .* has 8\.6; build the bundle without float8"),
    ],
)
def test_a_gpu_that_is_too_old_for_an_operator_is_rejected(
    operator: str, capability: tuple[int, int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    with pytest.raises(BackendUnavailable, match=way):
        implementations.launcher(operator, Context(torch.device("cuda"), Path("kernels")))
