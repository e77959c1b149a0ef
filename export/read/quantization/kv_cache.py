"""Read the float8 KV cache settings of a quantization_config, and the checkpoint's scales of keys and values."""

import re
from collections.abc import Mapping
from typing import Any

from tandemrt.engines.contract.dtypes import COMPUTE
from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.values import read_values, require_scales

# Names after "self_attn." for keys and values: compressed-tensors, ModelOpt, earlier compressed-tensors.
_NAMES = (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale"))
_LAYER = r"(?:model\.)?(?:(?:mtp_)?layers\.\d+|midlayer)"  # layers of a model, and of draft heads
_SCALE = re.compile(_LAYER + r"\.self_attn\.(?:" + "|".join(re.escape(n) for p in _NAMES for n in p) + ")")


def read_cache_scheme(fields: Fields) -> bool:
    """Whether ``kv_cache_scheme`` is float8 with one static scale per layer for keys, and one for values.

    Raises BadCheckpoint, by name, for any other scheme.
    """
    section: Any = fields.get("kv_cache_scheme")
    if section is None:
        return False
    where = f"{fields.where}: kv_cache_scheme"
    if not isinstance(section, dict):
        raise BadCheckpoint(f"{where} should be an object, it is {quoted(section)}")
    scheme = Fields(section, where)
    scheme.only("type", "float")
    scheme.only("num_bits", 8)
    scheme.only("strategy", "tensor")
    scheme.only("symmetric", True)
    scheme.only("dynamic", False)
    scheme.only("group_size", None)
    scheme.only("block_structure", None)
    scheme.skip("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")  # settings of the calibration
    scheme.finish()
    return True


def is_cache_scale(name: str) -> bool:
    """Whether the tensor ``name`` is a scale of keys or values."""
    return _SCALE.fullmatch(name) is not None


def cache_scales(tensors: Mapping[str, StoredTensor], attention: str) -> tuple[float, float]:
    """Return the scales of keys and values of ``attention`` ("model.layers.0.self_attn"); 1.0 if ``tensors`` has none.

    Raises BadCheckpoint for one without the other, and unless each is one number, finite and above 0.
    """
    for pair in _NAMES:
        names = [f"{attention}.{name}" for name in pair]
        scales = [tensors[name] for name in names if name in tensors]
        if len(scales) == 1:
            missing = next(name for name in names if name not in tensors)
            raise BadCheckpoint(
                f"{scales[0].file}: tensor {quoted(missing)} should accompany {quoted(scales[0].name)}, it is missing"
            )
        if scales:
            keys, of_values = (_number(tensor) for tensor in scales)
            return keys, of_values
    return 1.0, 1.0


def _number(tensor: StoredTensor) -> float:
    if tensor.shape not in ((), (1,), (1, 1)) or tensor.dtype not in COMPUTE:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should be one number in {', '.join(COMPUTE)}, it is "
            f"{tensor.dtype}{list(tensor.shape)}"
        )
    require_scales(tensor)
    return float(read_values(tensor).reshape(-1)[0])
