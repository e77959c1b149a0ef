"""The GPU of this machine, and what tests that it cannot run are skipped by."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tandemrt.engines.errors import BackendUnavailable
from tandemrt.engines.gpus import COMPUTE_CAPABILITIES, FLOAT8_FROM, Capability, capabilities_for, name_of

CAPABILITY: Capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
_WITH_EQUAL_BITS = (9, 0)  # a GPU on which algorithms were seen whose rows have equal bits

needs_float8 = pytest.mark.skipif(CAPABILITY < FLOAT8_FROM, reason="needs a CUDA GPU that has numbers in float8")


def compute_capabilities() -> tuple[str, ...]:
    """What to compile kernels for, so that this GPU runs them."""
    return capabilities_for(name_of(CAPABILITY), COMPUTE_CAPABILITIES)


@contextmanager
def skipped_without_equal_bits() -> Iterator[None]:
    """Skip what needs products whose rows have equal bits where cuBLASLt has none; a failure where it had some."""
    try:
        yield
    except BackendUnavailable as refusal:
        if CAPABILITY == _WITH_EQUAL_BITS or "whose rows have equal bits" not in str(refusal):
            raise
        pytest.skip(str(refusal))
