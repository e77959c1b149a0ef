"""The GPU of this machine, and skips for tests that it cannot run."""

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import torch

from tandemrt.engines.contract.gpus import COMPUTE_CAPABILITIES, FLOAT8_FROM, Capability, capabilities_for, name_of
from tandemrt.engines.validation.errors import BackendUnavailable

CAPABILITY: Capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
_WITH_EQUAL_BITS = (9, 0)  # a GPU for which cuBLASLt is known to have algorithms with equal bits per row

needs_float8 = pytest.mark.skipif(CAPABILITY < FLOAT8_FROM, reason="needs a CUDA GPU that has numbers in float8")


def compute_capabilities() -> tuple[str, ...]:
    """Return the compute capabilities to compile kernels for, so that this GPU runs them."""
    return capabilities_for(name_of(CAPABILITY), COMPUTE_CAPABILITIES)


@contextmanager
def skipped_without_equal_bits() -> Iterator[None]:
    """Skip the test if cuBLASLt has no matmul with equal bits per row; fail on GPUs that are known to have one."""
    try:
        yield
    except BackendUnavailable as refusal:
        if CAPABILITY == _WITH_EQUAL_BITS or "whose rows have equal bits" not in str(refusal):
            raise
        pytest.skip(str(refusal))


class Turn:
    """The right to run ranks on the GPUs, which one process of a test run has at a time.

    A GPU runs one process at a time, for milliseconds, and a kernel that waits for another rank keeps the GPU for as
    long. So ranks of several tests would wait for each other's slices at every sum.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Wait for the turn, unless this process has it."""
        if self._file is None:
            self._file = (Path(tempfile.gettempdir()) / "tandemrt-tests-of-ranks").open("w")
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def end(self) -> None:
        """Give the turn to another process."""
        if self._file is not None:
            self._file.close()
            self._file = None


TURN = Turn()
