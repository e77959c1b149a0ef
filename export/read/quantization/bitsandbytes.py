"""Read a config of bitsandbytes: floats of 4 bits from a table (NF4, FP4), or int8 with a scale per output.

https://github.com/bitsandbytes-foundation/bitsandbytes (functional.py, nn/modules.py)
"""

from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.module_patterns import match_name_parts, matmuls_except, read_strings
from tandemrt.export.read.quantization.scheme import FULL_DIM, Quantization, Scheme


def read_bitsandbytes(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config. Raises BadCheckpoint, by name, for unknown fields and values."""
    fields = Fields(config, where)
    fields.skip("quant_method", "_load_in_4bit", "_load_in_8bit", "llm_int8_enable_fp32_cpu_offload")
    fields.skip("bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant")  # the recipe's dtype; the tensors show it
    fields.skip("llm_int8_threshold")  # inputs above it are multiplied unquantized; here all are
    fields.only("bnb_4bit_quant_type", "fp4", "nf4")
    fields.only("bnb_4bit_quant_storage", "uint8")
    fields.only("llm_int8_has_fp16_weight", False)
    of_4_bits, of_8_bits = fields.flag("load_in_4bit", False), fields.flag("load_in_8bit", False)
    ignored = read_strings(fields, "llm_int8_skip_modules")
    fields.finish()
    if of_4_bits == of_8_bits:
        raise BadCheckpoint(
            f"{where}: one of load_in_4bit and load_in_8bit should be true, they are {quoted(of_4_bits)} and "
            f"{quoted(of_8_bits)}"
        )
    scheme = (
        Scheme("table4", "bitsandbytes", (1, FULL_DIM))
        if of_4_bits
        else Scheme("int8", "bitsandbytes", (1, FULL_DIM), unrounded="8-bit integers")
    )
    return Quantization("bitsandbytes", ((matmuls_except(match_name_parts(ignored)), scheme),))
