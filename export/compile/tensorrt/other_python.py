"""Build engines with the TensorRT of another Python interpreter, which runs ``worker.py``.

So an older release, or a container image's TensorRT, can build for this project without its packages.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.parallel.programs import run_program
from tandemrt.engines.recipe.tensorrt import TensorRt
from tandemrt.engines.user_cache import write_file
from tandemrt.engines.validation.errors import BackendUnavailable, BadRecipe, clipped, quoted
from tandemrt.export.compile.tensorrt import inspect as inspector
from tandemrt.export.compile.tensorrt import worker
from tandemrt.export.compile.tensorrt.config import built_on, timing_cache_file
from tandemrt.export.compile.tensorrt.engine import EngineReport, require_layers
from tandemrt.export.compile.tensorrt.plugin_graph import with_plugins
from tandemrt.export.compile.tensorrt.profiles import Profile, resolve
from tandemrt.plugins.tensorrt.bindings import dtype_of
from tandemrt.plugins.tensorrt.modules import with_advice


def build_elsewhere(
    onnx_path: Path,
    engine_path: Path,
    options: TensorRt,
    *,
    contract: Contract,
    profiles: Mapping[str, Profile],
    timing_cache: Path | None = None,
) -> EngineReport:
    """Compile ``onnx_path`` into ``engine_path`` with the TensorRT of ``options.python``; see ``build_engine``.

    ``contract``: the bindings of the graph.
    """
    assert options.python is not None
    begin = time.perf_counter()
    version = release(options.python)
    require_layers(version, options)
    built_for, compiler = built_on(options), f"tensorrt {version}"
    timings = timing_cache or timing_cache_file(version)
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / "timings"
        if timings.is_file():
            shutil.copyfile(timings, measured)
        graph = with_plugins(onnx_path, Path(folder), options.headers, release=version)
        pair = (2,) if graph.pairs else ()
        shapes = {b.name: (*b.shape, *(pair if b.dtype == "int64" else ())) for b in contract.inputs}
        ranges = {name: resolve(shapes, profile) for name, profile in profiles.items()}
        job = worker.Job(
            onnx=str(graph.path),
            plan=str(engine_path),
            result=str(Path(folder) / "result.json"),
            timing_cache=str(measured),
            plugins=[str(library) for library in graph.libraries],
            profiles=[
                {name: [list(sizes) for sizes in zip(*dims, strict=True)] for name, dims in inputs.items()}
                for inputs in ranges.values()
            ],
            half=any(binding.dtype == "float16" for binding in (*contract.inputs, *contract.outputs)),
            version_compatible=options.version_compatible,
            hardware_compatibility=options.hardware_compatibility,
            workspace_mib=options.workspace_mib,
            optimization_level=options.optimization_level,
        )
        written = Path(folder) / "job.json"
        written.write_text(json.dumps(job._asdict()), encoding="utf-8")
        ended = _run(options.python, str(written))
        result = Path(job.result)
        if not result.is_file():
            raise BackendUnavailable(f"{compiler} cannot compile {onnx_path}: {_last_lines(ended.stderr)}")
        report: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        if report["error"] is not None:
            raise BackendUnavailable(f"{compiler} cannot compile {onnx_path}: {with_advice(report['error'])}")
        with nullcontext() if timing_cache else suppress(OSError):  # the default file in the user's folder is optional
            write_file(timings, measured.read_bytes())
    inputs, outputs = (
        tuple(Binding(name, dtype_of(dtype), tuple(shape)) for name, dtype, shape in report[side])
        for side in ("inputs", "outputs")
    )
    return EngineReport(
        path=engine_path,
        inspection=inspector.write(
            engine_path,
            compiler=compiler,
            built_for=built_for,
            layers=report["layers"],
            profiles=ranges,
            opened=report,
        ),
        compiler=compiler,
        built_for=built_for,
        layers=report["layers"],
        contract=Contract(inputs, outputs, tuple((output, source) for output, source in report["aliases"])),
        nbytes=engine_path.stat().st_size,
        seconds=time.perf_counter() - begin,
    )


@cache
def release(python: str) -> str:
    """Return the release of TensorRT that ``python`` imports. Raises BadRecipe or BackendUnavailable."""
    ended = _run(python)
    if ended.returncode:
        raise BackendUnavailable(
            f"backend.python {quoted(python)} must import tensorrt: {_last_lines(ended.stderr)}; "
            f"install it there ({python} -m pip install tensorrt), or name another interpreter"
        )
    version: str = json.loads(ended.stdout)["version"]
    return version


def _run(python: str, *arguments: str) -> CompletedProcess[str]:
    interpreter = shutil.which(python)
    if interpreter is None:
        raise BadRecipe(
            f"backend.python must be a Python interpreter, a path or a name on PATH; got {quoted(python)}. Correct it"
        )
    # These variables describe this interpreter's packages.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    command = [interpreter, worker.__file__, *arguments]
    return run_program(command, environment=environment)


def _last_lines(text: str) -> str:
    return clipped("; ".join(text.strip().splitlines()[-3:]))
