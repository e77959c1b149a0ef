"""TensorRT plugins in C++: their generated table, their library, and the graph for a release without int64.

The library compiles against the headers of TensorRT that TENSORRT_HEADERS names; none are in the repository.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import onnx
import pytest

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.recipe.tensorrt import TensorRt
from tandemrt.engines.validation.errors import BackendUnavailable, BadRecipe
from tandemrt.export.compile.tensorrt.plugin_graph import with_plugins
from tandemrt.export.graph.builder import save_model
from tandemrt.export.model.weightless import build_verify
from tandemrt.plugins.operators.constants import DOMAIN
from tandemrt.plugins.tensorrt import library
from tandemrt.plugins.tensorrt.bindings import narrow_inputs, paired, widened
from tandemrt.plugins.tensorrt.operators import PLUGINS

VOCAB = 1000
NAMES = [plugin.name for plugin in PLUGINS]
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
PRELUDE = """
#include <cstdint>
#include <cstdio>
#include <vector>
enum class DataType { kFLOAT, kHALF };
"""
MAIN = """
int main() {
    int32_t const logits[] = {7, 5, 100000};
    for (Operator const& op : OPERATORS) {
        Launch const launch = op.launch(logits);
        printf("%s %zu", op.name, op.inputs.size());
        for (unsigned size : launch.grid) printf(" %u", size);
        printf(" %u", launch.threads);
        for (int32_t scalar : launch.scalars) printf(" %d", scalar);
        for (Output const& output : op.outputs) {
            printf(" :");
            for (int axis : output.axes) printf(" %d", logits[axis]);
        }
        for (Kernel const& kernel : op.kernels) printf(" %s", kernel.name);
        printf("\\n");
    }
}
"""


def headers(folder: Path, text: str = "#define NV_TENSORRT_MAJOR 8 //!< TensorRT major version.\n") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "NvInferVersion.h").write_text(text)
    return folder


@needs_compiler
def test_the_generated_table_has_the_launches_and_shapes_of_the_operators(tmp_path: Path) -> None:
    source = library.SOURCE.read_text()
    types = source[source.index("enum class Kind") : source.index('#include "operators.h"')]
    table = library._operators(PLUGINS, ["float32", "float16"])
    (tmp_path / "table.cpp").write_text(PRELUDE + types + table + MAIN)
    subprocess.run(["c++", "-std=c++17", str(tmp_path / "table.cpp"), "-o", str(tmp_path / "table")], check=True)
    printed = subprocess.run([str(tmp_path / "table")], check=True, capture_output=True, text=True).stdout.splitlines()
    shapes = {"logits": (7, 5, 100_000)}
    for plugin, line in zip(PLUGINS, printed, strict=True):
        launch = plugin.launch(shapes)
        outputs = [item for shape in plugin.output_shapes(shapes) for item in (":", *shape)]
        kernels = [plugin.kernel(dtype) for dtype in ("float32", "float16")]
        expected = [plugin.name, len(plugin.inputs), *launch.grid, launch.threads, *launch.scalars, *outputs, *kernels]
        assert line.split() == [str(item) for item in expected]


@needs_compiler
def test_the_library_has_the_entry_points_that_a_plan_is_opened_with(tmp_path: Path) -> None:
    folder = os.environ.get("TENSORRT_HEADERS")
    if folder is None:
        pytest.skip("TENSORRT_HEADERS must name the folder of TensorRT's NvInfer.h")
    major = library.major_of(Path(folder))
    compiled = ctypes.CDLL(str(library.compile_library(PLUGINS, Path(folder), tmp_path, release=f"{major}.0")))
    compiled.getPluginCreators.restype = ctypes.c_void_p
    count = ctypes.c_int32()
    assert compiled.getPluginCreators(ctypes.byref(count))
    assert count.value == len(NAMES)
    assert compiled.setLoggerFinder


@pytest.mark.parametrize(
    ("text", "release", "message"),
    [
        ("", "8.6.0", "backend.headers must be the folder of TensorRT's NvInfer.h"),
        ("#define NV_TENSORRT_MAJOR 10\n", "8.6.0", "must be the headers of TensorRT 8.6.0; got those of release 10"),
        (
            "#define TRT_MAJOR_ENTERPRISE 8\n",
            "10.3.0",
            "must be the headers of TensorRT 10.3.0; got those of release 8",
        ),
    ],
)
def test_headers_of_another_release_are_rejected(tmp_path: Path, text: str, release: str, message: str) -> None:
    with pytest.raises(BadRecipe, match=message):
        library.compile_library(PLUGINS, headers(tmp_path, text), tmp_path, release=release)


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match=r"looked for no-such-compiler, c\+\+, g\+\+, clang\+\+ on PATH"):
        library.compile_library(PLUGINS, headers(tmp_path), tmp_path, release="8.6.0")


@needs_compiler
def test_the_compiler_s_first_error_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/no/cuda")
    with pytest.raises(BackendUnavailable, match=r"NvInfer\.h.*/no/cuda/include"):
        library.compile_library(PLUGINS, headers(tmp_path), tmp_path, release="8.6.0")


@pytest.mark.parametrize("asked", [{"python": "python3"}, {"version_compatible": True}])
def test_headers_need_an_interpreter_and_a_version_compatible_plan(asked: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="headers needs python"):
        TensorRt.model_validate({"name": "tensorrt", "layers": "basic", "headers": "/usr/include", **asked})


@pytest.mark.parametrize("draft_probs", [False, True])
@pytest.mark.parametrize("release", ["8.6.0", "10.3.0"])
def test_the_graph_has_no_functions_and_no_int64_where_the_release_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, draft_probs: bool
) -> None:
    compiled = tmp_path / "library.so"
    monkeypatch.setattr("tandemrt.export.compile.tensorrt.plugin_graph.compile_library", lambda *_, **__: compiled)
    save_model(build_verify(vocab=VOCAB, dtype="float16", draft_probs=draft_probs), tmp_path / "verify.onnx")
    folder = tmp_path / "work"
    folder.mkdir()
    graph = with_plugins(tmp_path / "verify.onnx", folder, "/headers", release=release)
    assert graph.libraries == (compiled,)
    assert graph.pairs is (release == "8.6.0")
    model = onnx.load(graph.path)
    assert not model.functions
    assert {(node.domain, node.op_type) for node in model.graph.node} <= {(DOMAIN, name) for name in NAMES}
    expected = contract.verify(vocab=VOCAB, dtype="float16", draft_probs=draft_probs)
    declared = Contract(tuple(map(_binding, model.graph.input)), tuple(map(_binding, model.graph.output)))
    assert narrow_inputs(declared, expected) == ()
    assert bool(paired(declared, expected)) is graph.pairs
    assert expected.differences(widened(declared, expected)) == []


def test_a_graph_without_the_project_s_operators_remains_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "plain.onnx"
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [1]) for name in "xy")
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "plain", [x], [y])), file)
    assert with_plugins(file, tmp_path, "/headers", release="8.6.0") == (file, (), False)


def _binding(value: onnx.ValueInfoProto) -> Binding:
    tensor = value.type.tensor_type
    dtype = {1: "float32", 6: "int32", 7: "int64", 10: "float16"}[tensor.elem_type]
    return Binding(value.name, dtype, tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim))
