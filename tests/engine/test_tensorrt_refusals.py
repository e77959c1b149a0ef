"""What keeps a TensorRT engine from running is said before any request is accepted, with cause and fix."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tandemrt import LLM
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.recipe.backends import library_of
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.recipe.tensorrt import TensorRt
from tandemrt.engines.validation.errors import BackendUnavailable, BadRecipe
from tandemrt.export.bundle.build import build
from tandemrt.plugins.tensorrt.modules import load, load_builder, logger, opens, require_version, with_advice
from tandemrt.runtime.device.backends.opening import open_engines
from tandemrt.runtime.device.backends.tensorrt.open import deserialize, require_gpu
from tandemrt.runtime.device.backends.tensorrt.plan import memory_needed
from tests.makers import tiny_checkpoint, write_recipe

BACKEND = 'name = "tensorrt-rtx"\ncompute_capabilities = ["8.6", "12.0"]'
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("rtx")
    target = tiny_checkpoint(folder / "target", head_dim=32, layers=1)
    recipe = write_recipe(folder / "r.toml", target=target, dtype="float16", backend=BACKEND)
    return Bundle.open(build(Recipe.load(recipe), folder / "bundle").folder)


def test_a_missing_module_is_named_with_what_installs_it(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    with pytest.raises(BackendUnavailable, match=r"needs the module tensorrt_rtx_bindings.*pip install 'tandemrt\["):
        open_engines(bundle, torch.device("cpu"), 1)


@pytest.mark.parametrize(
    ("backend", "version", "message"),
    [
        ("tensorrt", "8.6.1", r"tensorrt must be version 10 or 11 \(tested: .*\); got 8\.6\.1; pip install"),
        (
            "tensorrt",
            "12.0.0",
            r"must be version 10 or 11 .*tandemrt\[tensorrt\]' or 'tandemrt\[tensorrt-lean\]'",
        ),
        ("tensorrt-rtx", "2.0.0.1", r"tensorrt-rtx must be version 1 \(tested: 1\.7\); got 2\.0\.0\.1; pip install"),
    ],
)
def test_another_major_version_is_refused(backend: str, version: str, message: str) -> None:
    library = library_of(backend)
    assert library is not None
    with pytest.raises(BackendUnavailable, match=message):
        require_version(backend, version, library.runs)


@pytest.mark.parametrize(
    ("backend", "version"),
    [("tensorrt", "10.16.1.11"), ("tensorrt", "11.4.0.106"), ("tensorrt", "11.9.1.2"), ("tensorrt-rtx", "1.8.0.1")],
)
def test_releases_of_the_supported_major_versions_are_accepted(backend: str, version: str) -> None:
    library = library_of(backend)
    assert library is not None
    require_version(backend, version, library.runs)


def module(version: str) -> ModuleType:
    stand_in = ModuleType("tensorrt")
    stand_in.__version__ = version  # type: ignore[attr-defined]
    return stand_in


def test_a_runtime_that_cannot_build_opens_engines_but_builds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    lean = module("10.16.1.11")
    for name in TensorRt.library.modules:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendUnavailable, match=r"needs the module tensorrt or tensorrt_lean or .* be imported"):
        load("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt_lean_bindings", lean)
    assert load("tensorrt") is lean
    with pytest.raises(BackendUnavailable, match=r"needs the module tensorrt, .*pip install 'tandemrt\[tensorrt\]'$"):
        load_builder("tensorrt")


def test_an_old_tensorrt_is_passed_over_for_a_runtime_that_opens_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TensorRt.library.modules:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "tensorrt", module("8.6.0"))
    with pytest.raises(BackendUnavailable, match=r"must be version 10 or 11 .*; got 8\.6\.0 of tensorrt; pip install"):
        load("tensorrt")
    lean = module("10.16.1.11")
    monkeypatch.setitem(sys.modules, "tensorrt_lean", lean)
    assert load("tensorrt") is lean


def test_a_module_that_is_no_tensorrt_is_refused() -> None:
    with pytest.raises(BadRecipe, match="backend must be one of tensorrt, tensorrt-rtx; got 'onnxruntime-cpu'"):
        load("onnxruntime-cpu")


@pytest.mark.parametrize("capability", [(9, 0), (8, 9), (7, 5)])
def test_a_gpu_that_the_recipe_did_not_name_is_refused(bundle: Bundle, capability: tuple[int, int]) -> None:
    message = rf"built for sm_86\+sm_120; the GPU here is sm_{capability[0]}{capability[1]}\. .*compute_capabilities"
    with pytest.raises(BackendUnavailable, match=message):
        require_gpu("target", bundle.engine("target"), capability)
    require_gpu("target", bundle.engine("target"), (12, 0))


def test_a_cpu_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BackendUnavailable, match=r"built for tensorrt-rtx, which runs on a GPU; .*onnxruntime-cpu"):
        LLM(bundle.folder, device="cpu")


@no_gpu
def test_a_machine_without_a_gpu_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BackendUnavailable, match=r"no CUDA GPU here.* built for tensorrt-rtx \(sm_86\+sm_120\)"):
        LLM(bundle.folder)


@no_gpu
def test_an_engine_that_does_not_open_raises_the_message_of_the_library(bundle: Bundle) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        deserialize(load("tensorrt-rtx"), "target", bundle.engine("target"), bundle.path("target"))
    message = str(caught.value)
    assert "engine 'target': tensorrt-rtx 1." in message
    assert "cannot open model.engine, built for sm_86+sm_120" in message
    assert "CUDA driver version is insufficient" in message
    assert "install an NVIDIA driver" in message


def test_a_file_that_is_no_engine_is_refused_in_the_words_of_the_library(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "model.engine").write_bytes(b"no engine at all" * 64)
    with pytest.raises(BackendUnavailable, match=r"magicTag.*build the bundle again.*export inspect"):
        deserialize(load("tensorrt-rtx"), "target", bundle.engine("target"), tmp_path / "model.engine")


def test_an_engine_that_was_cut_short_is_refused_in_the_words_of_the_library(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "model.engine").write_bytes(bundle.path("target").read_bytes()[:4096])
    with pytest.raises(BackendUnavailable, match=r"plan\.header\.size == blobSize"):
        deserialize(load("tensorrt-rtx"), "target", bundle.engine("target"), tmp_path / "model.engine")


def test_the_memory_a_bundle_needs_is_known_before_it_is_opened(bundle: Bundle) -> None:
    needed = memory_needed(bundle)
    slots, kv_heads, capacity, head_dim = 4, 2, 101, 32
    assert needed["caches of target"] == 2 * slots * kv_heads * capacity * head_dim * 2
    assert needed["engine target"] == bundle.path("target").stat().st_size


def test_a_plan_that_is_too_old_is_rejected_with_the_releases_that_open_it() -> None:
    seen = "Forward Compatibility supported starting TensorRT 10.0. This Engine was created with TensorRT 8.6"
    assert "; TensorRT 10 opens it: pip install 'tensorrt-lean-cu13-bindings<11'" in with_advice(seen)
    assert opens("tensorrt", "10.16.1.11") == "version-compatible plans of 8.6 and of earlier releases of 10"
    assert "8.6" not in opens("tensorrt", "11.4.0.106")


def test_messages_of_the_library_come_with_advice() -> None:
    log = logger(load("tensorrt-rtx"))
    log.clear()
    log.log(load("tensorrt-rtx").ILogger.ERROR, "getPluginCreator could not find plugin: verify_draft version: 1")
    log.log(load("tensorrt-rtx").ILogger.WARNING, "nothing to worry about")
    said = log.summary()
    log.clear()
    assert said.startswith("getPluginCreator could not find plugin: verify_draft version: 1; the engine needs a plugin")
    assert "worry" not in said
    assert "gave no reason" in log.summary()
