"""Run the CUDA kernels of low-bit matmuls and experts on a CPU and compare them with their definitions.

    python -m tools.quality.host_kernels                    # int4, int8, float4 and experts, in bfloat16 and float16

The kernels' source is compiled by g++ for x86-64 with AVX2. Compared are: results with numpy's, the bits of a row with
those among other numbers of rows and in clusters of two blocks, dequantized weights. Reads out of bounds and reads that
are not aligned end the process. This shows neither speed nor what a GPU's compiler makes of the source.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tools.quality.host_kernels.experts import EXPERTS, expert_cases
from tools.quality.host_kernels.library import compiled
from tools.quality.host_kernels.matmuls import GROUPS, matmul_cases

_NAMES = (*GROUPS, *EXPERTS)


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Kernel files: {', '.join(_NAMES)}. Default: all.")] = None,
) -> None:
    """Compare the kernels with their definitions."""
    for name in names or _NAMES:
        with tempfile.TemporaryDirectory() as folder:
            library, count = compiled(name, Path(folder)), 0
            for case in expert_cases(name) if name in EXPERTS else matmul_cases(name):
                case.check(library)
                count += 1
        print(f"{name}: {count} cases agree", flush=True)


if __name__ == "__main__":
    typer.run(main)
