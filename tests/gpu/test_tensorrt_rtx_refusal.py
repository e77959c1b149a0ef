"""A data centre GPU of compute capability 9.0: TandemRT refuses it before TensorRT-RTX, which does not support it.

The engines are built in a process that sees no GPU, because building needs none.
"""

import os
import subprocess
import sys

import pytest

from tandemrt import LLM
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.gpus import name_of
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins.tensorrt.modules import load
from tandemrt.runtime.device.backends.tensorrt.open import deserialize
from tests.gpu.here import CAPABILITY
from tests.makers import tiny_checkpoint, write_recipe

pytest.importorskip("tensorrt_rtx_bindings")
pytestmark = pytest.mark.skipif(CAPABILITY != (9, 0), reason="TensorRT-RTX supports other GPUs than 9.0")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("rtx")
    target = tiny_checkpoint(folder / "target", head_dim=32, layers=1)
    write_recipe(folder / "r.toml", target=target)
    command = [sys.executable, "-c", "from tandemrt.cli import main; main()", "export", "build", str(folder / "r.toml")]
    options = ["--backend", "tensorrt-rtx", "--dtype", "float16", "--out", str(folder / "bundle")]
    subprocess.run([*command, *options], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=True)
    return Bundle.open(folder / "bundle")


def test_the_gpu_is_not_among_those_the_engine_was_built_for(bundle: Bundle) -> None:
    with pytest.raises(BackendUnavailable, match=rf"built for sm_75\+.*; the GPU here is {name_of(CAPABILITY)}\. "):
        LLM(bundle.folder)


def test_deserialising_is_refused_by_tensorrt_rtx_itself(bundle: Bundle) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        deserialize(load("tensorrt-rtx"), "target", bundle.engine("target"), bundle.path("target"))
    message = str(caught.value)
    print(message)  # the library's message, shown with -s
    assert "cannot open model.engine" in message
    assert "the compute capability of this GPU is not supported by TensorRT-RTX" in message
    assert "gave no reason" not in message
