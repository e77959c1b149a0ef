"""TensorRT's own runtime and API, as far as possible without a builder and (mostly) without a GPU."""

from pathlib import Path

import pytest
import torch

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineEntry
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.recipe.tensorrt import TensorRt
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.export.bundle.build import build
from tandemrt.export.compile.tensorrt.engine import build_engine
from tandemrt.export.compile.tensorrt.profiles import Range
from tandemrt.plugins.tensorrt.modules import load
from tandemrt.runtime.device.backends.tensorrt.open import deserialize
from tests.makers import tiny_checkpoint, write_recipe

PROFILES = {"window": {"batch": Range(1, 4, 4), "query": Range(1, 5, 5), "rows": Range(1, 5, 5)}}


@pytest.fixture(scope="module")
def rtx(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle whose engine TensorRT-RTX built."""
    folder = tmp_path_factory.mktemp("rtx")
    target = tiny_checkpoint(folder / "target", head_dim=32, layers=1)
    recipe = write_recipe(folder / "r.toml", target=target)
    return Bundle.open(build(Recipe.load(recipe, backend="tensorrt-rtx", dtype="float16"), folder / "bundle").folder)


def test_the_loaded_version_is_the_tested_one() -> None:
    assert load("tensorrt").__version__.startswith(tuple(TensorRt.library.tested.split(", ")))


def test_the_api_used_by_builds_and_runs_exists() -> None:
    trt = load("tensorrt")
    assert set(trt.HardwareCompatibilityLevel.__members__) >= {"NONE", "SAME_COMPUTE_CAPABILITY", "AMPERE_PLUS"}
    assert "VERSION_COMPATIBLE" in trt.BuilderFlag.__members__
    assert "USER_MANAGED" in trt.ExecutionContextAllocationStrategy.__members__
    assert "WORKSPACE" in trt.MemoryPoolType.__members__
    assert "DETAILED" in trt.ProfilingVerbosity.__members__
    assert "KV_CACHE_UPDATE" in trt.LayerType.__members__
    used = {
        trt.IBuilderConfig: ("create_timing_cache", "set_timing_cache", "get_timing_cache", "set_memory_pool_limit"),
        trt.ICudaEngine: (
            "create_engine_inspector",
            "create_execution_context",
            "device_memory_size_v2",
            "get_aliased_input_tensor",
            "get_device_memory_size_for_profile_v2",
            "get_tensor_location",
            "get_tensor_profile_shape",
        ),
        trt.Runtime: ("deserialize_cuda_engine", "engine_host_code_allowed"),
        trt.IExecutionContext: (
            "execute_async_v3",
            "set_device_memory",
            "set_input_shape",
            "set_optimization_profile_async",
            "set_tensor_address",
        ),
    }
    missing = [f"{kind.__name__}.{name}" for kind, names in used.items() for name in names if not hasattr(kind, name)]
    assert missing == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_building_without_a_gpu_is_rejected(rtx: Bundle, tmp_path: Path) -> None:
    graph = rtx.path("target").with_suffix(".onnx")
    with pytest.raises(BackendUnavailable, match=r"builds on the GPU that runs the engines.*tensorrt-rtx"):
        build_engine(graph, tmp_path / "e", TensorRt(name="tensorrt"), profiles=PROFILES)
    assert list(tmp_path.iterdir()) == []


def test_tensorrt_rejects_an_engine_of_tensorrt_rtx(rtx: Bundle) -> None:
    built = rtx.engine("target")
    entry = EngineEntry(
        file=built.file, backend="tensorrt", built_for="sm_90", dtype=built.dtype, contract=built.contract
    )
    with pytest.raises(BackendUnavailable) as caught:
        deserialize(load("tensorrt"), "target", entry, rtx.path("target"))
    print(caught.value)  # the message of the library, shown by -s
    assert "engine 'target': tensorrt 11." in str(caught.value)
    assert "gave no reason" not in str(caught.value)
