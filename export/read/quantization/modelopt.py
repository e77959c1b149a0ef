"""Read the config of NVIDIA's ModelOpt: one algorithm for all matmuls, or one per module (MIXED_PRECISION).

https://github.com/NVIDIA/Model-Optimizer (modelopt/torch/export/quant_utils.py)
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.kv_cache import read_cache_scheme
from tandemrt.export.read.quantization.module_patterns import any_name, matmuls_except, read_strings
from tandemrt.export.read.quantization.mxfp4 import GROUP_SIZE as MX_GROUP
from tandemrt.export.read.quantization.nvfp4 import GROUP_SIZE
from tandemrt.export.read.quantization.scheme import FULL_DIM, Quantization, Scheme

_NVFP4 = Scheme("nvfp4", "modelopt", (1, GROUP_SIZE))
_INT8 = Scheme("int8", "integers", (1, FULL_DIM))
_SCHEMES: Mapping[str, Scheme] = {
    "FP8": Scheme("float8_e4m3fn", "modelopt", (FULL_DIM, FULL_DIM), inputs="static"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("float8_e4m3fn", "modelopt", (1, FULL_DIM), inputs="token"),
    "NVFP4": replace(_NVFP4, unrounded="4-bit floats"),
    "NVFP4_AWQ": replace(_NVFP4, unrounded="4-bit floats"),
    "W4A16_NVFP4": _NVFP4,
    "W4A8_NVFP4_FP8": replace(_NVFP4, unrounded="8-bit floats"),
    "MXFP8": Scheme("mxfp8", "modelopt", (1, MX_GROUP), unrounded="8-bit floats"),
    "W8A16": _INT8,
    "W8A8_SQ_PER_CHANNEL": replace(_INT8, unrounded="8-bit integers"),
}
_MIXED = "MIXED_PRECISION"


def read_modelopt(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config or a hf_quant_config.json. Raises BadCheckpoint for unknown fields and values."""
    fields = Fields(config, where)
    # Implied by quant_algo, or shown by a tensor.
    fields.skip("quant_method", "producer", "config_groups", "group_size", "has_zero_point", "pre_quant_scale")
    algorithm = fields.get("quant_algo", "FP8")
    fields.only("quant_algo", *_SCHEMES, _MIXED)
    fields.only("kv_cache_quant_algo", None, "FP8")
    float8_cache = read_cache_scheme(fields) or fields.get("kv_cache_quant_algo") is not None
    patterns = (*read_strings(fields, "ignore"), *read_strings(fields, "exclude_modules"))
    layers = fields.get("quantized_layers", {})
    fields.finish()

    ignored = any_name(lambda module: any(fnmatchcase(module, each) for each in patterns))
    if algorithm == _MIXED:
        return Quantization("modelopt", _by_module(layers, ignored, where), float8_cache)
    return Quantization("modelopt", ((matmuls_except(ignored, head=True), _SCHEMES[algorithm]),), float8_cache)


def _by_module(layers: Any, ignored: Callable[..., bool], where: str) -> tuple[tuple[Callable[..., bool], Scheme], ...]:
    """Return a rule per algorithm of ``quantized_layers``, for the modules it names and those below them."""
    if not isinstance(layers, dict) or not layers or not all(isinstance(each, dict) for each in layers.values()):
        raise BadCheckpoint(f"{where}: quantized_layers should map modules to objects, it is {quoted(layers)}")
    modules: dict[str, set[str]] = {}
    for module, settings in layers.items():
        inner = Fields(settings, f"{where}: quantized_layers, {module}")
        inner.only("quant_algo", *_SCHEMES)
        inner.skip("group_size", "has_zero_point", "pre_quant_scale")
        algorithm = inner.get("quant_algo", "FP8")
        inner.finish()
        modules.setdefault(algorithm, set()).add(module)

    def below(named: set[str]) -> Callable[..., bool]:
        starts = any_name(lambda module: any(start in named for start in _starts(module)))
        return lambda *names: starts(*names) and not ignored(*names)

    return tuple((below(named), _SCHEMES[algorithm]) for algorithm, named in modules.items())


def _starts(module: str) -> list[str]:
    """Return "a", "a.b" and "a.b.c" for "a.b.c"."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
