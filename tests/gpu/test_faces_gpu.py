"""Every operator with kernels, on a CUDA device: the cases of its other faces, against the definition."""

from pathlib import Path

import pytest
import torch

from tandemrt.plugins.faces import FACES
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.launch import Context
from tests.engine.face_cases import KINDS, LARGEST, cases, hold
from tests.gpu.here import compute_capabilities


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder: Path = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, head_dims=[32])
    return Context(torch.device("cuda", 0), folder, sizes=LARGEST)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("operator", [name for name, faces in FACES.items() if faces.cuda])
def test_the_kernels_equal_the_definition(operator: str, dtype: str, context: Context) -> None:
    for case in cases(operator, dtype):
        hold(operator, case, context)
