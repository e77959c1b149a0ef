"""Logits for logprobs leave the device with the round's other copies, and later rounds do not change them."""

import pytest
import torch

from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.device.streams import HostCopy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_snapshot_keeps_its_values_when_the_source_is_overwritten(dtype: torch.dtype) -> None:
    source = torch.arange(6, dtype=dtype).view(2, 3)
    copied = HostCopy(source)
    source.fill_(7)
    copied.copy_out()
    source.fill_(8)
    assert copied.floats().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_values_that_were_not_copied_cannot_be_read() -> None:
    with pytest.raises(InternalError, match="before their copy"):
        HostCopy(torch.zeros(2)).floats()
