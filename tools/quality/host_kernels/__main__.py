"""Run the CUDA kernels of low-bit matmuls, experts and wide attention heads on a CPU, and compare with definitions.

    python -m tools.quality.host_kernels            # int4, int8, float4, experts, attention, in bfloat16 and float16

The kernels' source is compiled by g++ for x86-64 with AVX2. Compared are: results with numpy's, the bits of a row with
those among other numbers of rows, in clusters of two blocks and by other splits, dequantized weights. Reads out of
bounds and reads that are not aligned end the process. This shows neither speed nor what a GPU's compiler makes of the
source.
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.quality.host_kernels.attention import ATTENTION, DEFINES, attention_cases
from tools.quality.host_kernels.experts import EXPERTS, expert_cases
from tools.quality.host_kernels.library import compiled
from tools.quality.host_kernels.matmuls import GROUPS, matmul_cases

_CASES: Mapping[str, Callable[[], Iterable[Any]]] = {
    **{name: partial(matmul_cases, name) for name in GROUPS},
    **{name: partial(expert_cases, name) for name in EXPERTS},
    ATTENTION: attention_cases,
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Kernel files: {', '.join(_CASES)}. Default: all.")] = None,
) -> None:
    """Compare the kernels with their definitions."""
    for name in names or _CASES:
        with tempfile.TemporaryDirectory() as folder:
            library, count = compiled(name, Path(folder), DEFINES if name == ATTENTION else ()), 0
            for case in _CASES[name]():
                case.check(library)
                count += 1
        print(f"{name}: {count} cases agree", flush=True)


if __name__ == "__main__":
    typer.run(main)
