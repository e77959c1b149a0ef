"""Kernels compiled for the GPU of this machine."""

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.operators.launch import Context


@contextmanager
def compiled_kernels(
    *names: str, dtypes: Collection[str] | None = None, head_dims: Collection[int] | None = None
) -> Iterator[Context]:
    """Compile the kernel files ``names`` into a temporary folder; yield a launch context.

    ``dtypes`` and ``head_dims``: those that are needed; None: all.
    """
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        compile_kernels([f"{major}.{minor}"], Path(folder), names=names, dtypes=dtypes, head_dims=head_dims)
        yield Context(torch.device("cuda", torch.cuda.current_device()), Path(folder))
