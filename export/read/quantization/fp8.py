"""Read ``fp8`` and ``mxfp8`` of transformers: float8_e4m3fn, scales per 128 x 128, per tensor or per 32 inputs.

Source: transformers, integrations/finegrained_fp8.py.
"""

from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.module_patterns import match_name_parts, matmuls_except, read_strings
from tandemrt.export.read.quantization.mxfp4 import GROUP_SIZE as MX_GROUP
from tandemrt.export.read.quantization.scheme import FULL_DIM, Quantization, Scheme


def read_fp8(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config. Raises BadCheckpoint, by name, for unknown fields and values."""
    fields = Fields(config, where)
    fields.skip("quant_method", "dequantize")  # dequantize is an option of transformers
    fields.only("fmt", "e4m3", "float8_e4m3fn")
    fields.only("scale_fmt", "float", "ue8m0")  # ue8m0: scales are powers of 2; those of weights are stored
    powers = fields.get("scale_fmt") == "ue8m0"
    fields.only("modules_to_convert", None, [])
    fields.only("activation_scheme", "dynamic", "static")
    # Routers are never quantized; DeepSeek-V3's config does not list them.
    ignored = (*read_strings(fields, "modules_to_not_convert"), *read_strings(fields, "ignored_layers"), "mlp.gate")
    static = fields.get("activation_scheme") == "static"
    block = _block(fields)
    fields.finish()
    if static and block != (FULL_DIM, FULL_DIM):
        raise BadCheckpoint(
            f"{where}: activation_scheme should be dynamic where weight_block_size is {list(block)}, it is static"
        )
    how: Any = "static" if static else "token"
    scheme = Scheme("float8_e4m3fn", "fp8", block, inputs=how, input_group=block[1])
    remarks = ("scales of inputs are not rounded to powers of 2, as scale_fmt ue8m0 would",) if powers else ()
    return Quantization("fp8", ((matmuls_except(match_name_parts(ignored)), scheme),), remarks=remarks)


def read_mxfp8(config: dict[str, Any], where: str) -> Quantization:
    """Read a config of ``mxfp8``: scales are powers of 2, stored as exponents in ``weight_scale_inv``.

    Raises BadCheckpoint, by name, for unknown fields and values.
    """
    fields = Fields(config, where)
    fields.skip("quant_method", "dequantize")
    fields.only("fmt", "e4m3", "float8_e4m3fn")
    fields.only("scale_fmt", "ue8m0", "float")  # transformers reads the type of the stored scales instead
    fields.only("modules_to_convert", None, [])
    fields.only("activation_scheme", "dynamic")
    fields.only("weight_block_size", [1, MX_GROUP])
    ignored = (*read_strings(fields, "modules_to_not_convert"), *read_strings(fields, "ignored_layers"), "mlp.gate")
    fields.finish()
    scheme = Scheme("mxfp8", "fp8", (1, MX_GROUP), unrounded="8-bit floats")
    return Quantization("mxfp8", ((matmuls_except(match_name_parts(ignored)), scheme),))


def read_fbgemm_fp8(config: dict[str, Any], where: str) -> Quantization:
    """Read a config of ``fbgemm_fp8`` (Llama 3.1 405B FP8): a scale per output, inputs rounded per token.

    Source: transformers, integrations/fbgemm_fp8.py. Raises BadCheckpoint, by name, for unknown fields and values.
    """
    fields = Fields(config, where)
    fields.skip("quant_method")
    limit = fields.number("activation_scale_ub", 1200.0)
    ignored = read_strings(fields, "modules_to_not_convert")
    fields.finish()
    scheme = Scheme("float8_e4m3fn", "modelopt", (1, FULL_DIM), inputs="token")
    remarks = (f"inputs above {limit:g} are not clipped, as activation_scale_ub would",)
    return Quantization("fbgemm_fp8", ((matmuls_except(match_name_parts(ignored)), scheme),), remarks=remarks)


def _block(fields: Fields) -> tuple[int, int]:
    sizes = fields.data.get("weight_block_size", [128, 128])  # null: one scale per tensor; absent: the default
    fields.skip("weight_block_size")
    if sizes is None:
        return FULL_DIM, FULL_DIM
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)):
        rule = "weight_block_size should be two integers or null"
        raise BadCheckpoint(f"{fields.where}: {rule}, it is {quoted(sizes)}")
    return sizes[0], sizes[1]
