"""Read a config of torchao: FP8 or int8 with a scale per output, as transformers saves its tensor classes.

Source: torchao 0.18, prototype/safetensors (names of tensors) and core/config.py (the form of the config).
"""

from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.module_patterns import match_name_parts, matmuls_except, read_strings
from tandemrt.export.read.quantization.scheme import FULL_DIM, Quantization, Scheme

_FLOAT8 = Scheme("float8_e4m3fn", "modelopt", (1, FULL_DIM))
_INT8 = Scheme("int8", "integers", (1, FULL_DIM))
_SCHEMES = {
    "Float8WeightOnlyConfig": _FLOAT8,
    "Float8DynamicActivationFloat8WeightConfig": Scheme("float8_e4m3fn", "modelopt", (1, FULL_DIM), inputs="token"),
    "Int8WeightOnlyConfig": _INT8,
    "Int8DynamicActivationInt8WeightConfig": Scheme("int8", "integers", (1, FULL_DIM), unrounded="8-bit integers"),
}
# They choose kernels, and how scales are found.
_KERNELS = ("kernel_preference", "set_inductor_config", "mm_config", "alg_id", "reduce_range", "weight_only_decode")


def read_torchao(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config. Raises BadCheckpoint, by name, for unknown fields and values."""
    fields = Fields(config, where)
    fields.skip("quant_method", "untie_embedding_weights")  # the tensors show it
    fields.only("include_input_output_embeddings", False)
    ignored = read_strings(fields, "modules_to_not_convert")
    kinds = fields.get("quant_type")
    fields.finish()
    default = kinds.get("default") if isinstance(kinds, dict) and len(kinds) == 1 else None
    name = str(default.get("_type")) if isinstance(default, dict) else ""
    if not isinstance(default, dict) or name not in _SCHEMES or not isinstance(default.get("_data"), dict):
        raise BadCheckpoint(
            f"{where}: quant_type should have one of {', '.join(_SCHEMES)} as its default, it is {quoted(kinds)}; "
            "integers of 4 bits have zero points in floats, which the exporter does not implement: choose a checkpoint "
            "in a format of docs/quantization.md, or the one that is not quantized"
        )
    _require_rows(default["_data"], f"{where}: quant_type, {name}")
    return Quantization("torchao", ((matmuls_except(match_name_parts(ignored)), _SCHEMES[name]),))


def _require_rows(data: dict[str, Any], where: str) -> None:
    """Raise BadCheckpoint unless the weights have a symmetric scale per output, and inputs one per token."""
    plain = {name: each.get("_data", each) if isinstance(each, dict) else each for name, each in data.items()}
    fields = Fields(plain, where)
    fields.skip(*_KERNELS)
    fields.only("weight_dtype", "float8_e4m3fn")
    fields.only("activation_dtype", "float8_e4m3fn")
    fields.only("packing_format", "PLAIN")
    fields.only("act_mapping_type", "SYMMETRIC")
    for name in ("group_size", "activation_value_lb", "activation_value_ub"):
        fields.only(name, None)
    fields.skip("granularity")
    fields.finish()
    granularity = data.get("granularity")
    for each in granularity if isinstance(granularity, list) else [granularity]:
        if each is not None and (not isinstance(each, dict) or each.get("_type") != "PerRow"):
            raise BadCheckpoint(
                f"{where}: granularity should be PerRow, for weights and inputs, it is {quoted(each)}; dynamic scales "
                "of whole tensors would let the requests of a batch change one another: quantize again with PerRow"
            )
