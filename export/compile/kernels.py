"""The kernels of a bundle: the project's CUDA operators, compiled while the bundle is built."""

from collections.abc import Sequence
from pathlib import Path

from tandemrt.engines.bundle import KERNELS
from tandemrt.plugins.kernels.compile import compile_kernels


def compile_into(folder: Path, name: str, architectures: Sequence[str]) -> dict[str, str]:
    """Compile the kernels of ``name``.cu for ``architectures`` ("9.0", …) into the bundle in ``folder``.

    Returns what a manifest says of them: file to ``sm_90`` (a cubin), or ``compute_80`` (PTX of the lowest one, for
    GPUs newer than all of them). Raises BackendUnavailable without NVRTC, or when it refuses the source.
    """
    lowest = min(int(architecture.replace(".", "")) for architecture in architectures)
    return {
        path.relative_to(folder).as_posix(): f"compute_{lowest}" if path.suffix == ".ptx" else path.suffixes[-2][1:]
        for path in compile_kernels(architectures, folder / KERNELS, names=[name])
    }
