"""TensorRT 11's Python API without its builder, because the package index has full wheels of 8.5 and 8.6.0 only.

``tensorrt_bindings`` links to ``libnvinfer``, ``libnvinfer_plugin`` and ``libnvonnxparser``. The lean runtime is on the
index and has the plugin registry. Three small objects stand in for the missing libraries: the builder's registry is
that of the runtime, and there is no builder and no parser.
"""

import ctypes
import importlib
import platform
import sys
from pathlib import Path
from types import ModuleType

from tests.tensorrt.shared_object import SharedObject

_LEAN = "libnvinfer_lean.so.11"
_NOTHING = 0

_STAND_INS = (
    SharedObject(
        "libnvinfer.so.11",
        returns={"createInferBuilder_INTERNAL": _NOTHING},
        forwards={"getBuilderPluginRegistry": "getPluginRegistry"},
        needed=(_LEAN,),
    ),
    SharedObject("libnvinfer_plugin.so.11", returns={"initLibNvInferPlugins": 1}),
    SharedObject(
        "libnvonnxparser.so.11",
        returns={
            "getNvOnnxParserVersion": _NOTHING,
            "createNvOnnxParser_INTERNAL": _NOTHING,
            "createNvOnnxParserRefitter_INTERNAL": _NOTHING,
        },
    ),
)


def load(folder: Path) -> ModuleType:
    """Make ``import tensorrt`` and ``import tensorrt.plugin`` work in this process; write the objects to ``folder``.

    A library loaded by its path satisfies every later need for its name, so no search path is involved.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise RuntimeError(f"the stand-in is written for Linux on x86-64, this is {platform.platform()}")
    libraries = importlib.import_module("tensorrt_lean_libs").__file__
    assert libraries is not None
    ctypes.CDLL(str(Path(libraries).with_name(_LEAN)))
    for stand_in in _STAND_INS:
        ctypes.CDLL(str(stand_in.write(folder)))
    sys.modules["tensorrt"] = importlib.import_module("tensorrt_bindings")
    return sys.modules["tensorrt"]
