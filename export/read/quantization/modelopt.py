"""NVIDIA's ModelOpt: FP8 with a scale per tensor, for weights and, static, for inputs."""

from fnmatch import fnmatchcase
from typing import Any

from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.cache import read_cache_scheme
from tandemrt.export.read.quantization.names import layers_but, strings
from tandemrt.export.read.quantization.scheme import WHOLE, Quantization, Scheme


def read_modelopt(said: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config, or the same in hf_quant_config.json. Raises BadCheckpoint for the rest."""
    fields = Fields(said, where)
    fields.skip("quant_method", "producer", "config_groups", "group_size")  # quant_algo says what follows from them
    fields.only("quant_algo", "FP8")
    fields.only("kv_cache_quant_algo", None, "FP8")
    float8_cache = read_cache_scheme(fields) or fields.get("kv_cache_quant_algo") is not None
    patterns = (*strings(fields, "ignore"), *strings(fields, "exclude_modules"))
    fields.finish()
    scheme = Scheme("float8_e4m3fn", "modelopt", (WHOLE, WHOLE), inputs="static")
    left = layers_but(lambda module: any(fnmatchcase(module, each) for each in patterns), head=True)
    return Quantization("modelopt", ((left, scheme),), float8_cache)
