"""A bundle records the packages that determine its bytes."""

from importlib import metadata

import pytest

from tandemrt.export.bundle.provenance import collect

COMPILERS = ("onnx", "onnx-ir", "nvidia-cuda-nvrtc", "tensorrt-rtx-cu13-bindings")


@pytest.mark.parametrize("package", COMPILERS)
def test_every_compiler_is_named_with_its_version(package: str) -> None:
    assert collect(recipe="0" * 64, checkpoints={}).packages[package] == metadata.version(package)
