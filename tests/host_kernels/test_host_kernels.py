"""CUDA kernels of low-bit matmuls, experts and attention, run on a CPU, agree with their definitions.

Their source is compiled by g++ for x86-64 with AVX2. Compared are: results with numpy's, the bits of a row with those
among other numbers of rows, in clusters of two blocks and by other splits, dequantized weights. Reads out of bounds and
reads that are not aligned end the process. This shows neither speed nor what a GPU's compiler makes of the source.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.host_kernels.attention import ATTENTION, attention_cases
from tests.host_kernels.attention import DEFINES as ATTENTION_DEFINES
from tests.host_kernels.experts import EXPERTS, expert_cases
from tests.host_kernels.few_attention import HEAD_DIM, few_rows_cases
from tests.host_kernels.library import compiled
from tests.host_kernels.matmuls import MATMULS, matmul_cases
from tests.host_kernels.ordered_experts import ORDERED, ordered_cases

CASES: Mapping[str, Callable[[], Iterable[Any]]] = {
    **{name: partial(matmul_cases, name) for name in MATMULS},
    **{name: partial(expert_cases, name) for name in EXPERTS},
    ORDERED: ordered_cases,
    ATTENTION: lambda: chain(attention_cases(), few_rows_cases()),
}
DEFINES = {ATTENTION: (*ATTENTION_DEFINES, f"HEAD_{HEAD_DIM}=1"), ORDERED: ("SELECTED", "BF16=1", "FP16=1")}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_agrees_with_its_definition(name: str, tmp_path: Path) -> None:
    library = compiled(name, tmp_path, DEFINES.get(name, ()))
    for case in CASES[name]():
        case.check(library)
