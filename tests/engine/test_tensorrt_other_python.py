"""Another interpreter builds an engine: the worker, its job and its result, with TensorRT-RTX in TensorRT's place.

TensorRT-RTX has the same API and builds without a GPU. It runs in a process of its own, in which it is ``tensorrt``.
"""

import ast
import json
import sys
from pathlib import Path

import pytest

from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.recipe.tensorrt import TensorRt
from tandemrt.engines.validation.errors import BackendUnavailable, BadRecipe
from tandemrt.export.compile.tensorrt import worker
from tandemrt.export.compile.tensorrt.engine import EngineReport, require_layers
from tandemrt.export.compile.tensorrt.other_python import build_elsewhere, release
from tandemrt.export.compile.tensorrt.profiles import Range
from tandemrt.export.graph.builder import save_model
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.passes.pipelines import PIPELINES
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tests.engine.decoding import make_checkpoint

SITE = Path(pytest.importorskip("tensorrt_rtx_bindings").__file__).parents[1]
WINDOW = {"batch": Range(1, 2, 4), "query": Range(1, 5, 8), "rows": Range(1, 5, 8)}
PREFILL = {"batch": Range(1, 1, 4), "query": Range(1, 16, 16), "rows": Range(1, 1, 1)}
AS_TENSORRT = """
from tensorrt_rtx_bindings import *
import tensorrt_rtx_bindings as rtx

__version__ = "10.15.0.1"


class Builder(rtx.Builder):
    def create_builder_config(self):
        config = super().create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(rtx.ComputeCapability.SM86, 0)
        return config
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with a module ``tensorrt``. It ignores this environment's packages and the project."""
    return interpreter(tmp_path_factory.mktemp("python"), AS_TENSORRT)


def interpreter(folder: Path, module: str) -> str:
    (folder / "site").mkdir()
    (folder / "site" / "tensorrt.py").write_text(module)
    path = f"{folder / 'site'}:{SITE}"
    script = folder / "python"
    script.write_text(f'#!/bin/sh\n[ -z "$PYTHONPATH" ] || exit 3\nPYTHONPATH={path} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def options(python: str, **changes: object) -> TensorRt:
    # With this level the kind of GPU that builds is not asked for.
    asked = {"layers": "basic", "hardware_compatibility": "ampere_plus", **changes}
    return TensorRt(name="tensorrt", python=python, **asked)


def build(folder: Path, chosen: TensorRt, dtype: str) -> tuple[EngineReport, Contract]:
    make_checkpoint("qwen3", folder)
    checkpoint = Checkpoint.open(folder)
    spec = ModelSpec.from_hf(checkpoint.config)
    lowering = chosen.layer_set.lowering
    model = build_decoder(spec, checkpoint, dtype=dtype, capacity=64, lowering=lowering)
    PIPELINES[lowering](model)
    save_model(model, folder / "model.onnx")
    contract = spec.contract(capacity=64, dtype=dtype)
    report = build_elsewhere(
        folder / "model.onnx",
        folder / "model.engine",
        chosen,
        contract=contract,
        profiles={"window": WINDOW, "prefill": PREFILL},
        timing_cache=folder / "timings" / "file",
    )
    return report, contract


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_basic_lowering_is_built_by_another_interpreter(tmp_path: Path, python: str, dtype: str) -> None:
    report, expected = build(tmp_path, options(python), dtype)
    assert expected.differences(report.contract) == []
    assert report.contract.aliases == ()
    assert report.compiler == "tensorrt 10.15.0.1"
    assert report.built_for == "sm_80-up"
    assert report.nbytes == report.path.stat().st_size > 0
    assert (tmp_path / "timings" / "file").is_file()
    inspection = json.loads(report.inspection.read_text())
    assert inspection["network_layers"]["SOFTMAX"] == 2
    assert inspection["network_layers"]["SCATTER"] == 4
    assert inspection["native"] == {"attention": 0, "cache update": 0, "rotary embedding": 0, "plugin": 0}
    assert inspection["profiles"]["prefill"]["inputs"]["token_ids"] == [[1, 1, 4], [1, 16, 16]]
    assert inspection["engine_layers"] is not None or inspection["engine_not_opened"]


def test_native_layers_report_what_they_update_in_place(tmp_path: Path, python: str) -> None:
    report, expected = build(tmp_path, options(python, layers="native"), "float16")
    assert set(report.contract.aliases) == set(expected.aliases) != set()
    assert json.loads(report.inspection.read_text())["native"]["cache update"] == 4


def test_an_interpreter_that_dies_leaves_an_error_with_its_last_words(tmp_path: Path) -> None:
    dying = AS_TENSORRT + "\n\ndef OnnxParser(*_):\n    raise SystemExit('no more memory')\n"
    with pytest.raises(BackendUnavailable, match=r"tensorrt 10\.15\.0\.1 cannot compile .*model\.onnx: no more memory"):
        build(tmp_path, options(interpreter(tmp_path, dying)), "float32")
    assert not (tmp_path / "model.engine").exists()


def test_an_error_about_kept_timings_is_not_the_reason_of_a_failed_build(tmp_path: Path) -> None:
    """TensorRT 8.6 reports one for every timing cache, and uses the cache."""
    failing = """

class Failing(Builder):
    def __init__(self, log):
        super().__init__(log)
        self.report = lambda message: log.log(rtx.ILogger.ERROR, message)

    def create_builder_config(self):
        create = rtx.IBuilderConfig.create_timing_cache

        def create_timing_cache(config, kept):
            self.report("Myelin error from unknown graph")
            return create(config, kept)

        rtx.IBuilderConfig.create_timing_cache = create_timing_cache
        return super().create_builder_config()

    def build_serialized_network(self, network, config):
        self.report("no kernel")


Builder = Failing
"""
    python = interpreter(tmp_path, AS_TENSORRT + failing)
    with pytest.raises(BackendUnavailable, match=r"cannot compile .*: the builder returned no plan; no kernel$"):
        build(tmp_path, options(python), "float32")


def test_an_interpreter_without_tensorrt_is_rejected_with_what_installs_it() -> None:
    with pytest.raises(BackendUnavailable, match=r"must import tensorrt: .*No module named 'tensorrt'.*-m pip install"):
        release(sys.executable)


def test_a_missing_interpreter_is_rejected() -> None:
    with pytest.raises(BadRecipe, match=r"backend\.python must be a Python interpreter.*got 'python0\.1'"):
        release("python0.1")


@pytest.mark.parametrize(
    ("version", "layers", "message"),
    [
        ("8.6.0", "native", r"'native' needs TensorRT 10\.15 or later; got 8\.6\.0; write layers = \"basic\""),
        ("10.14.1.48", "native", "needs TensorRT 10.15 or later"),
        ("8.5.3.1", "basic", r"'basic' needs TensorRT 8\.6 or later; got 8\.5\.3\.1; name the interpreter"),
    ],
)
def test_a_release_without_the_layers_is_rejected(version: str, layers: str, message: str) -> None:
    with pytest.raises(BadRecipe, match=message):
        require_layers(version, TensorRt(name="tensorrt", layers=layers))


@pytest.mark.parametrize(("version", "layers"), [("8.6.0", "basic"), ("10.15.1.29", "native"), ("11.4", "native")])
def test_a_release_with_the_layers_is_accepted(version: str, layers: str) -> None:
    require_layers(version, TensorRt(name="tensorrt", layers=layers))


def test_the_worker_is_python_3_8_and_imports_nothing_of_the_project() -> None:
    source = Path(worker.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported <= {*sys.stdlib_module_names, "tensorrt"}
