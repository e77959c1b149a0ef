"""Reject published forms of quantization that the exporter does not implement: what is missing, and what to do."""

from collections.abc import Mapping
from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, quoted

_ELSE = "choose a checkpoint in a format of docs/quantization.md, or the one that is not quantized"
_REPACK = "choose the checkpoint from which it was repacked"
_AT_LOAD = ("rounding of unquantized weights by this tool", "take quantization_config out of config.json")
_MX = "quantize with compressed-tensors or ModelOpt, whose MXFP4, MXFP8 and NVFP4 are read, or do without"

# quant_method -> how its weights are stored, and what to do.
_METHODS: Mapping[str, tuple[str, str]] = {
    "aqlm": ("codes that add up vectors of codebooks", _ELSE),
    "vptq": ("indices of vectors in codebooks", _ELSE),
    "quip": ("indices of lattice points, in a rotated basis", _ELSE),
    "higgs": ("indices of grid points, in a rotated basis", _ELSE),
    "spqr": ("integers of 3 bits with unquantized outliers", _ELSE),
    "hqq": ("integers with scales and zero points in floats, in W_q and meta tensors", _ELSE),
    "quanto": ("parts of optimum-quanto's tensor classes", _ELSE),
    "eetq": ("int8 in the order of the EETQ kernels", _ELSE),
    "bitnet": ("ternary weights in 2 bits, with inputs rounded to 8 bits", _ELSE),
    "fp_quant": ("4-bit floats in a rotated basis, with inputs rotated at run time", _ELSE),
    "fouroversix": ("4-bit floats in the layout of fouroversix", _ELSE),
    "metal": ("integers in the order of the Metal kernels", _ELSE),
    "sinq": ("integers with scales for outputs and for inputs", _ELSE),
    "gemma": ("integers of 2, 4 or 8 bits, with inputs rounded to 8 bits", _ELSE),
    "mlx": ("integers in the layout of MLX", _ELSE),
    "exl2": ("integers of mixed bits in the order of the ExLlamaV2 kernels", _ELSE),
    "exl3": ("trellis codes of ExLlamaV3, in a rotated basis", _ELSE),
    "qqq": ("4-bit integers in the order of the QQQ kernels, with inputs in int8", _ELSE),
    "marlin": ("integers in the order of the Marlin kernels", _REPACK),
    "bitblas": ("integers in the order of the BitBLAS kernels", _REPACK),
    "intel/auto-round": ("the layout of earlier versions of AutoRound", "quantize again with a later one"),
    "nvfp4": _AT_LOAD,
    "experts_int8": _AT_LOAD,
    "deepspeedfp": _AT_LOAD,
    "gguf": ("GGUF tensors in a folder", "name the .gguf file as the checkpoint"),
}

# quant_method -> field -> value -> what is missing, and what to do.
_VALUES: Mapping[str, Mapping[str, Mapping[Any, tuple[str, str]]]] = {
    "gptq": {
        "bits": {each: (f"integers of {each} bits", "quantize to 4 or 8 bits") for each in (2, 3, 5, 6)},
        "checkpoint_format": {
            "marlin": ("integers in the order of the Marlin kernels", _REPACK),
            "marlin_24": ("2:4 sparse integers in the order of the Marlin kernels", _REPACK),
            "bitblas": ("integers in the order of the BitBLAS kernels", _REPACK),
        },
        "is_marlin_format": {True: ("integers in the order of the Marlin kernels", _REPACK)},
    },
    "awq": {
        "bits": {each: (f"AWQ in {each} bits", "quantize to 4 bits") for each in (2, 3, 8)},
        "version": {
            "gemv_fast": ("integers in the order of the gemv_fast kernel", "pack with version gemm"),
            "llm-awq": ("integers in the order of the kernels of llm-awq", "pack with AutoAWQ, version gemm"),
            "marlin": ("integers in the order of the Marlin kernels", "pack with version gemm"),
        },
    },
    "auto-round": {
        "bits": {each: (f"integers of {each} bits", "quantize to 4 or 8 bits") for each in (2, 3, 5, 6)},
        "data_type": {
            each: (f"AutoRound's {what}", _MX)
            for each, what in {"fp": "FP8", "fp8": "FP8", "mx_fp": "MXFP4 and MXFP8", "nv_fp": "NVFP4"}.items()
        },
        "act_bits": {each: (f"inputs in {each} bits", "quantize weights only") for each in (4, 8)},
    },
    "modelopt": {
        "quant_algo": {
            "W4A16_AWQ": ("integers of 4 bits with pre_quant_scale, in ModelOpt's order", "quantize to FP8 or NVFP4"),
            "W4A8_AWQ": ("integers of 4 bits with pre_quant_scale, in ModelOpt's order", "quantize to FP8 or NVFP4"),
            "NVFP4_SVD": ("a low-rank residual next to the weights", "quantize to NVFP4"),
            "W4A8_MXFP4_FP8": ("ModelOpt's MXFP4", "quantize to NVFP4 or MXFP8"),
            "FP8_PB_WO": ("ModelOpt's FP8 with scales of 2-D groups", "quantize to FP8 or MXFP8"),
            "FP8_PB_REAL": ("ModelOpt's FP8 with scales of 2-D groups", "quantize to FP8 or MXFP8"),
        },
        "kv_cache_quant_algo": {
            each: (f"keys and values in {each}", "quantize them to FP8, or not at all")
            for each in ("NVFP4", "INT8", "NVFP4_AFFINE")
        },
    },
    "fp8": {
        "expert_dtype": {
            "fp4": ("experts in 4-bit floats next to FP8 (DeepSeek-V4)", "choose a checkpoint with experts in FP8"),
        },
    },
    "compressed-tensors": {
        "format": {
            "marlin-24": ("2:4 sparse integers in the order of the Marlin kernels", _REPACK),
            "sparse-24-bitmask": ("2:4 sparse weights without their zeros", "quantize without sparse compression"),
            "sparse-bitmask": ("sparse weights without their zeros", "quantize without sparse compression"),
            "mxfp6-pack-quantized": ("floats of 6 bits", "quantize with preset MXFP4 or MXFP8"),
        },
    },
}


def require_implemented(method: str | None, config: Mapping[str, Any], where: str) -> None:
    """Raise BadCheckpoint, by name, for a published ``method`` or value that the exporter does not implement."""
    if method is None and {"bits", "group_size"} <= set(config):
        raise _rejected(where, "quant_method is missing, as in checkpoints of MLX", _METHODS["mlx"])
    if method is not None and method in _METHODS:
        raise _rejected(where, f"quant_method is {quoted(method)}", _METHODS[method])
    for field, values in _VALUES.get(method or "", {}).items():
        value = config.get(field)
        if isinstance(value, str | int) and value in values:
            raise _rejected(where, f"{field} is {quoted(value)}", values[value])


def _rejected(where: str, what: str, why: tuple[str, str]) -> BadCheckpoint:
    return BadCheckpoint(f"{where}: {what}: the exporter does not implement {why[0]}; {why[1]}")
