"""MXFP4, which gpt-oss comes in: its experts in floats of 4 bits, 32 of which share a power of 2.

transformers: integrations/mxfp4.py; the numbers: OCP Microscaling Formats (MX) Specification 1.0, 5.3.3 and 5.4.1
"""

from fnmatch import fnmatchcase
from typing import Any

from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.names import strings
from tandemrt.export.read.quantization.scheme import Quantization, Scheme

BLOCK = 32  # values that share a scale, by the format


def read_mxfp4(said: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config. Raises BadCheckpoint, by name, for what is not understood."""
    fields = Fields(said, where)
    fields.skip("quant_method", "dequantize")  # whether transformers should
    left = strings(fields, "modules_to_not_convert")
    fields.finish()

    def names(module: str) -> bool:
        return ".mlp.experts." in module and not any(fnmatchcase(f"{module}.", f"{each}.*") for each in left)

    return Quantization("mxfp4", ((names, Scheme("mxfp4", "mxfp4", (1, BLOCK))),))
