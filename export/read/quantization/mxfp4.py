"""Read the MXFP4 config of gpt-oss: experts in floats of 4 bits, with one power of 2 as scale per 32 values.

Sources: transformers, integrations/mxfp4.py; OCP Microscaling Formats (MX) Specification 1.0, 5.3.3 and 5.4.1.
"""

from fnmatch import fnmatchcase
from typing import Any

from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.module_patterns import any_name, read_strings
from tandemrt.export.read.quantization.scheme import Quantization, Scheme

GROUP_SIZE = 32  # values per scale, fixed by the format


def read_mxfp4(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config. Raises BadCheckpoint, by name, for unknown fields and values."""
    fields = Fields(config, where)
    fields.skip("quant_method", "dequantize")  # dequantize is an option of transformers
    ignored = read_strings(fields, "modules_to_not_convert")
    fields.finish()

    listed = any_name(lambda module: any(fnmatchcase(f"{module}.", f"{each}.*") for each in ignored))

    def is_quantized(*names: str) -> bool:
        return any(".mlp.experts." in name for name in names) and not listed(*names)

    return Quantization("mxfp4", ((is_quantized, Scheme("mxfp4", "mxfp4", (1, GROUP_SIZE))),))
