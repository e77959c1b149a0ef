"""Read the quantization of a checkpoint with the reader of the method that its config names."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, clipped, quoted
from tandemrt.export.read.quantization.bitsandbytes import read_bitsandbytes
from tandemrt.export.read.quantization.compressed_tensors import read_compressed_tensors
from tandemrt.export.read.quantization.fp8 import read_fbgemm_fp8, read_fp8, read_mxfp8
from tandemrt.export.read.quantization.gguf import read_gguf_section
from tandemrt.export.read.quantization.gptq_awq import read_auto_round, read_awq, read_gptq
from tandemrt.export.read.quantization.modelopt import read_modelopt
from tandemrt.export.read.quantization.mxfp4 import read_mxfp4
from tandemrt.export.read.quantization.quark import read_quark
from tandemrt.export.read.quantization.scheme import Quantization
from tandemrt.export.read.quantization.torchao import read_torchao
from tandemrt.export.read.quantization.unsupported import require_implemented

METHODS: Mapping[str, Callable[[dict[str, Any], str], Quantization]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm_fp8,
    "gguf_file": read_gguf_section,
    "modelopt": read_modelopt,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "mxfp4": read_mxfp4,
    "mxfp8": read_mxfp8,
    "bitsandbytes": read_bitsandbytes,
    "quark": read_quark,
    "torchao": read_torchao,
}
_SEPARATE_FILE = "hf_quant_config.json"  # older versions of ModelOpt write it instead of a field of config.json


def read_quantization(config: Mapping[str, Any], folder: Path) -> Quantization | None:
    """Read how the weights of the checkpoint in ``folder`` are stored; None: no weight is quantized.

    Raises BadCheckpoint, by name, for unknown fields and values.
    """
    section = config.get("quantization_config")
    where = "config.json: quantization_config"
    if section is None and (folder / _SEPARATE_FILE).is_file():
        where = _SEPARATE_FILE
        section = _read_separate_file(folder / _SEPARATE_FILE)
    mlx = config.get("quantization")  # MLX writes this field, and older versions no other
    if isinstance(mlx, dict) and section in (None, mlx):
        where, section = "config.json: quantization", {"quant_method": "mlx", **mlx}
    if section is None:
        return None
    method = _method(section) if isinstance(section, dict) else None
    if isinstance(section, dict):
        require_implemented(method, section, where)
    if method is None or method not in METHODS:
        actual = quoted(section) if not isinstance(section, dict) else "missing" if method is None else quoted(method)
        raise BadCheckpoint(
            f"{where}: quant_method should be one of {', '.join(METHODS)}, it is {actual}; quantize the model with a "
            "tool that writes one of these, or export the checkpoint that is not quantized"
        )
    return METHODS[method](section, where)


def _method(section: dict[str, Any]) -> str | None:
    method = section.get("quant_method")
    if method is None and (section.get("load_in_4bit") or section.get("load_in_8bit")):
        return "bitsandbytes"  # older versions write no quant_method, and transformers reads it like this
    return None if method is None else str(method)


def _read_separate_file(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{file}: should hold JSON: {clipped(error)}; download it again") from error
    section = data.get("quantization") if isinstance(data, dict) else None
    if not isinstance(section, dict):
        raise BadCheckpoint(f"{file}: should have an object 'quantization', it holds {quoted(data)}")
    return {"quant_method": "modelopt", **section}
