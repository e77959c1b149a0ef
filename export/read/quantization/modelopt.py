"""Read the config of NVIDIA's ModelOpt: FP8 with one scale per tensor for weights, and a static one for inputs."""

from fnmatch import fnmatchcase
from typing import Any

from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.kv_cache import read_cache_scheme
from tandemrt.export.read.quantization.module_patterns import matmuls_except, read_strings
from tandemrt.export.read.quantization.scheme import FULL_DIM, Quantization, Scheme


def read_modelopt(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config or a hf_quant_config.json. Raises BadCheckpoint for unknown fields and values."""
    fields = Fields(config, where)
    fields.skip("quant_method", "producer", "config_groups", "group_size")  # implied by quant_algo
    fields.only("quant_algo", "FP8")
    fields.only("kv_cache_quant_algo", None, "FP8")
    float8_cache = read_cache_scheme(fields) or fields.get("kv_cache_quant_algo") is not None
    patterns = (*read_strings(fields, "ignore"), *read_strings(fields, "exclude_modules"))
    fields.finish()
    scheme = Scheme("float8_e4m3fn", "modelopt", (FULL_DIM, FULL_DIM), inputs="static")
    quantized = matmuls_except(lambda module: any(fnmatchcase(module, each) for each in patterns), head=True)
    return Quantization("modelopt", ((quantized, scheme),), float8_cache)
