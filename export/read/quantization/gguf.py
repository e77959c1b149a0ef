"""Read which weights of a checkpoint keep the bytes of a GGUF file (export/quantize/gguf writes this section)."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.module_patterns import any_name
from tandemrt.export.read.quantization.scheme import GgufType, Quantization, Scheme, Weight

_INTEGERS: Mapping[str, Weight] = {"Q4_0": "int4", "Q8_0": "int8"}  # with one scale per group, as other formats have
_WEIGHTS: Mapping[str, Weight] = {**_INTEGERS, "MXFP4": "mxfp4", **{kind: kind for kind in get_args(GgufType)}}
_SCHEMES = {kind: Scheme(weight, "gguf", (1, 16 if kind == "Q6_K" else 32)) for kind, weight in _WEIGHTS.items()}
GGUF_TYPES = frozenset(_SCHEMES)  # types that a checkpoint can keep
MATMUL_TYPES = frozenset(_INTEGERS)  # those that matmuls of all backends read
GPU_TYPES = GGUF_TYPES - {"Q4_1", "Q5_1", "Q5_K"}  # those that a GPU has matmuls for
GPU_EXPERTS = frozenset({*_INTEGERS, "MXFP4"})  # those that it has operators of experts for


def gguf_section(modules: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the quantization_config for the ``modules`` of each type."""
    return {"quant_method": "gguf_file", "modules": dict(modules)}


def read_gguf_section(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config. Raises BadCheckpoint for a type that is not kept."""
    fields = Fields(config, where)
    fields.skip("quant_method")
    modules: Any = fields.get("modules", {})
    fields.finish()
    if not isinstance(modules, dict) or not modules.keys() <= GGUF_TYPES:
        raise BadCheckpoint(
            f"{where}: modules should be lists of modules for types of {', '.join(sorted(GGUF_TYPES))}, it is "
            f"{quoted(modules)}"
        )
    rules = [(any_name(frozenset(names).__contains__), _SCHEMES[kind]) for kind, names in modules.items()]
    return Quantization("gguf", tuple(rules))


def gguf_type(scheme: Scheme) -> str:
    """Return the type of a weight in the layout "gguf"."""
    return next(kind for kind, each in _SCHEMES.items() if each == scheme)
