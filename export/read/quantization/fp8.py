"""``fp8`` of transformers (Qwen3-FP8, DeepSeek, Devstral): float8_e4m3fn in blocks of 128 x 128, or per tensor.

transformers: integrations/finegrained_fp8.py
"""

from typing import Any

from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.names import layers_but, parts_of, strings
from tandemrt.export.read.quantization.scheme import WHOLE, Quantization, Scheme


def read_fp8(said: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config. Raises BadCheckpoint, by name, for what is not understood."""
    fields = Fields(said, where)
    fields.skip("quant_method", "dequantize")  # whether transformers should
    fields.only("fmt", "e4m3")
    fields.only("scale_fmt", "float")
    fields.only("modules_to_convert", None, [])
    fields.only("activation_scheme", "dynamic", "static")
    left = (*strings(fields, "modules_to_not_convert"), *strings(fields, "ignored_layers"))
    static = fields.get("activation_scheme") == "static"
    block = _block(fields)
    fields.finish()
    if static and block != (WHOLE, WHOLE):
        raise BadCheckpoint(
            f"{where}: activation_scheme should be dynamic where weight_block_size is {list(block)}, it is static"
        )
    how: Any = "static" if static else "token"
    scheme = Scheme("float8_e4m3fn", "fp8", block, inputs=how, input_block=block[1])
    return Quantization("fp8", ((layers_but(parts_of(left)), scheme),))


def _block(fields: Fields) -> tuple[int, int]:
    found = fields.data.get("weight_block_size", [128, 128])  # null is a scale per tensor, no field is the default
    fields.skip("weight_block_size")
    if found is None:
        return WHOLE, WHOLE
    if not (isinstance(found, list) and len(found) == 2 and all(type(n) is int and n > 0 for n in found)):
        rule = "weight_block_size should be two whole numbers or null"
        raise BadCheckpoint(f"{fields.where}: {rule}, it is {quoted(found)}")
    return found[0], found[1]
