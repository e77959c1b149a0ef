"""Compile the plugins into a shared library, for a TensorRT of another interpreter whose release has C++ plugins only.

The library is compiled against headers of that release, which the user has. A version-compatible plan contains it.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from tandemrt.engines.contract.operators import T
from tandemrt.engines.parallel.programs import run_program
from tandemrt.engines.validation.errors import BackendUnavailable, BadRecipe, clipped, quoted
from tandemrt.plugins.operators.constants import DOMAIN
from tandemrt.plugins.tensorrt.bindings import DATA_TYPES
from tandemrt.plugins.tensorrt.operators import Plugin

SOURCE = Path(__file__).with_name("library.cpp")
NAME = "libtandemrt_plugins.so"
_COMPILERS = ("c++", "g++", "clang++")  # after $CXX
_CUDA = ("/usr/local/cuda/include",)  # after $CUDA_HOME
_AXES = ("batch", "window+1", "vocab")  # of the logits
_KINDS = {T: "LOGITS", "float32": "FLOAT32", "int32": "INT32", "int64": "INT64"}
_TIMEOUT_S = 300


def compile_library(plugins: Iterable[Plugin], headers: Path, folder: Path, *, release: str) -> Path:
    """Compile ``plugins`` for TensorRT ``release`` ("8.6.0") into a library in ``folder``, and return its path.

    Raises BadRecipe if ``headers`` are not those of the release, BackendUnavailable if they cannot be compiled.
    """
    major = major_of(headers)
    if major != int(release.split(".")[0]):
        raise BadRecipe(
            f"backend.headers must be the headers of TensorRT {release}; got those of release {major} in "
            f"{quoted(str(headers))}; name the headers of the release that backend.python imports"
        )
    dtypes = ["float32", "float16", *(["bfloat16"] if major >= 10 else [])]
    (folder / "operators.h").write_text(_operators([*plugins], dtypes))
    wanted = [*filter(None, [os.environ.get("CXX")]), *_COMPILERS]
    compiler = next(filter(None, map(shutil.which, wanted)), None)
    if compiler is None:
        raise BackendUnavailable(
            f"backend.headers needs a C++ compiler, for the plugins; looked for {', '.join(wanted)} on PATH; install "
            "g++, name a compiler in CXX, or leave headers out"
        )
    cuda = [f"{os.environ['CUDA_HOME']}/include"] if "CUDA_HOME" in os.environ else []
    include = [str(folder), str(headers), *cuda, *_CUDA]
    library = folder / NAME
    options = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-deprecated-declarations"]
    command = [compiler, *options, *(f"-I{path}" for path in include), str(SOURCE), "-ldl", "-o", str(library)]
    try:
        run_program(command, timeout_s=_TIMEOUT_S).check_returncode()
    except subprocess.CalledProcessError as error:
        first = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr)
        raise BackendUnavailable(
            f"{compiler} cannot compile the plugins: {clipped(first)}; they need TensorRT's headers in backend.headers "
            f"and CUDA's, looked for in {', '.join([*cuda, *_CUDA])}; install the CUDA toolkit or set CUDA_HOME"
        ) from error
    return library


def major_of(headers: Path) -> int:
    """Return the major version of TensorRT's headers. Raises BadRecipe if there are none."""
    try:
        text = (headers / "NvInferVersion.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^#define (?:NV_TENSORRT_MAJOR|TRT_MAJOR_ENTERPRISE) (\d+)", text, re.MULTILINE)
    if match is None:
        raise BadRecipe(
            f"backend.headers must be the folder of TensorRT's NvInfer.h and NvInferVersion.h; got "
            f"{quoted(str(headers))}; correct it"
        )
    return int(match[1])


class _Axis(str):
    """A C++ expression of a dimension."""

    def __add__(self, other: object) -> "_Axis":
        return _Axis(f"({self} + {other})")

    def __mul__(self, other: object) -> "_Axis":
        return _Axis(f"({self} * {other})")

    def __floordiv__(self, other: object) -> "_Axis":
        return _Axis(f"({self} / {other})")


def _operators(plugins: Sequence[Plugin], dtypes: Sequence[str]) -> str:
    rows = ",\n".join(_operator(plugin, dtypes) for plugin in plugins)
    return f'constexpr char const* NAMESPACE = "{DOMAIN}";\n\nOperator const OPERATORS[] = {{\n{rows}}};\n'


def _operator(plugin: Plugin, dtypes: Sequence[str]) -> str:
    axes = {name: _Axis(f"logits[{axis}]") for axis, name in enumerate(_AXES)}
    shapes = {"logits": tuple(axes.values())}
    positions = {expression: axis for axis, expression in enumerate(axes.values())}
    inputs = ", ".join(f"Kind::{_KINDS[binding.dtype]}" for binding in plugin.inputs)
    outputs = ", ".join(
        f"{{Kind::{_KINDS[binding.dtype]}, {{{', '.join(str(positions[dim]) for dim in shape)}}}}}"
        for binding, shape in zip(plugin.outputs, plugin.output_shapes(shapes), strict=True)
    )
    launch = plugin.launch(shapes)
    grid = ", ".join(f"static_cast<unsigned>({size})" for size in launch.grid)
    launched = f"Launch{{{{{grid}}}, {launch.threads}, {{{', '.join(map(str, launch.scalars))}}}}}"
    kernels = ",\n".join(
        f'{{"{plugin.kernel(dtype)}", DataType::k{DATA_TYPES[dtype]}, R"PTX({plugin.ptx(dtype)})PTX"}}'
        for dtype in dtypes
    )
    return (
        f'{{"{plugin.name}", {{{inputs}}}, {{{outputs}}},\n'
        f"[](int32_t const* logits) {{ return {launched}; }},\n{{{kernels}}}}}"
    )
