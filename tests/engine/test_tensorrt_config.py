"""What a recipe says of TensorRT reaches the builder's configuration.

TensorRT-RTX's configuration object stands for TensorRT's: the same class of the same source, and one that needs no GPU.
"""

from pathlib import Path

import pytest

from tandemrt.engines.recipe.tensorrt import TensorRt, TensorRtRtx
from tandemrt.export.compile.tensorrt.config import configure, load_timings, save_timings
from tandemrt.export.compile.tensorrt.worker import Failed
from tandemrt.plugins.tensorrt.modules import load, logger

trt = load("tensorrt-rtx")


@pytest.fixture
def config():
    builder = trt.Builder(logger(trt))
    return builder.create_builder_config()


def test_options_that_are_named_are_set(config) -> None:
    options = TensorRt(
        name="tensorrt",
        hardware_compatibility="ampere_plus",
        version_compatible=True,
        workspace_mib=64,
        optimization_level=5,
    )
    assert configure(trt, config, options) == "sm_80-up"
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 64 << 20
    assert config.builder_optimization_level == 5
    assert config.get_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    assert config.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    assert config.profiling_verbosity == trt.ProfilingVerbosity.DETAILED


def test_options_that_are_not_named_stay_the_librarys(config) -> None:
    workspace = config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)
    configure(trt, config, TensorRt(name="tensorrt", hardware_compatibility="ampere_plus"))
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == workspace
    assert not config.get_flag(trt.BuilderFlag.VERSION_COMPATIBLE)


def test_an_option_that_the_release_lacks_is_rejected(config) -> None:
    options = TensorRt(name="tensorrt").model_copy(update={"hardware_compatibility": "every_gpu"})
    with pytest.raises(Failed, match=r"hardware_compatibility must be one of none, .*ampere_plus.* in this release"):
        configure(trt, config, options)


def test_every_gpu_of_the_recipe_is_named(config) -> None:
    options = TensorRtRtx(name="tensorrt-rtx", compute_capabilities=("8.6", "12.0"))
    assert configure(trt, config, options) == "sm_86+sm_120"
    assert [config.get_compute_capability(i).name for i in range(config.num_compute_capabilities)] == ["SM86", "SM120"]


@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX")  # it measures nothing: its cache stays empty
def test_timings_are_kept_in_a_file_that_the_next_build_reads(config, tmp_path: Path) -> None:
    file = tmp_path / "cache" / "tensorrt.timing"
    load_timings(config, file)
    save_timings(config, file)
    assert file.is_file()
    assert [each.name for each in file.parent.iterdir()] == ["tensorrt.timing"]
    load_timings(config, file)
    assert config.get_timing_cache() is not None
