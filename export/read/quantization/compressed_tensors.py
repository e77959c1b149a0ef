"""Read a compressed-tensors config (llm-compressor): groups of modules, each with a format of weights and inputs.

https://github.com/vllm-project/compressed-tensors (quantization/quant_config.py, quant_args.py)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.kv_cache import read_cache_scheme
from tandemrt.export.read.quantization.module_patterns import EMBEDDING, any_name, compile_pattern, read_strings
from tandemrt.export.read.quantization.mxfp4 import GROUP_SIZE as MX_GROUP
from tandemrt.export.read.quantization.nvfp4 import GROUP_SIZE as NVFP4_GROUP
from tandemrt.export.read.quantization.scheme import FULL_DIM, GROUPS, Layout, Quantization, Scheme

# The accepted names of the format; the groups define what is stored.
_FORMATS = (
    *("float-quantized", "naive-quantized", "pack-quantized", "mixed-precision", "int-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_UNPACKED = ("int-quantized", "naive-quantized")  # formats that store one integer per byte
_SEARCHED = ("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")  # settings of the calibration


def read_compressed_tensors(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config. Raises BadCheckpoint, by name, for unknown fields and values."""
    fields = Fields(config, where)
    fields.skip("quant_method", "version", "global_compression_ratio")
    fields.only("quantization_status", "compressed", "frozen")
    fields.only("format", *_FORMATS)
    stored = fields.get("format")
    float8_cache = read_cache_scheme(fields)
    if sparsity := fields.get("sparsity_config"):
        raise BadCheckpoint(
            f"{where}: sparsity_config is {quoted(sparsity)}: the exporter does not implement sparse weights; quantize "
            "without sparse compression"
        )
    fields.only("moe_sparsity_config", None)
    if transform := fields.get("transform_config"):
        raise BadCheckpoint(
            f"{where}: transform_config is {quoted(transform)}: the exporter does not implement rotations of inputs "
            "(SpinQuant, QuIP); quantize without transforms"
        )
    ignored = _named(read_strings(fields, "ignore"), where)
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not (groups or float8_cache):  # no groups: only keys and values are quantized
        raise BadCheckpoint(f"{where}: config_groups should name at least one group, it is {quoted(groups)}")
    fields.finish()
    rules = []
    for name, group in groups.items():
        title = f"{where}: group {quoted(name)}"
        targets, scheme = _group(_object(group, title), title, stored)
        rules.append((lambda *names, t=targets: t(*names) and not ignored(*names), scheme))
    return Quantization("compressed-tensors", tuple(rules), float8_cache)


def _group(group: dict[str, Any], where: str, stored: Any) -> tuple[Callable[..., bool], Scheme]:
    """Read a group of modules: the test of their names and their scheme. ``stored``: the format of all groups."""
    fields = Fields(group, where)
    targets = _named(read_strings(fields, "targets"), where)
    fields.only("output_activations", None)
    fields.only("format", None, *_FORMATS)
    weights = _object(fields.get("weights"), f"{where}: weights")
    inputs = fields.get("input_activations")
    stored = fields.get("format", stored)
    fields.finish()
    scheme = _weights(Fields(weights, f"{where}: weights"), stored)
    if inputs is not None:
        activations = Fields(_object(inputs, f"{where}: input_activations"), f"{where}: input_activations")
        if scheme.weight == "float8_e4m3fn":
            how, block = _inputs(activations)
            return targets, replace(scheme, inputs=how, input_group=block)
        return targets, replace(scheme, unrounded=_unrounded(activations))
    return targets, scheme


def _weights(fields: Fields, stored: Any) -> Scheme:
    kind, bits = fields.get("type", "int"), fields.get("num_bits", 8)
    strategy = fields.get("strategy")
    symmetric = fields.flag("symmetric", True)
    fields.only("dynamic", False)
    fields.skip(*_SEARCHED)
    if (kind, bits) == ("float", 8) and stored == "mxfp8-quantized":
        fields.only("symmetric", True)
        fields.only("block_structure", None)
        fields.only("group_size", MX_GROUP)
        block = _one_of(fields, "strategy", strategy, {"group": (1, MX_GROUP)})
        scheme = Scheme("mxfp8", "compressed-tensors", block)
    elif (kind, bits) == ("float", 8):
        fields.only("symmetric", True)
        blocks = {"tensor": (FULL_DIM, FULL_DIM), "channel": (1, FULL_DIM), "block": _block(fields)}
        fields.skip("group_size")
        scheme = Scheme("float8_e4m3fn", "compressed-tensors", _one_of(fields, "strategy", strategy, blocks))
    elif (kind, bits) in (("int", 4), ("int", 8)):
        fields.only("block_structure", None)
        blocks = {"channel": (1, FULL_DIM)}
        if strategy == "group":
            fields.only("group_size", *GROUPS)
            blocks["group"] = (1, fields.integer("group_size"))
        fields.skip("group_size")
        unpacked = stored in _UNPACKED and bits == 8
        if unpacked:
            fields.only("symmetric", True)
            blocks["tensor"] = (FULL_DIM, FULL_DIM)
        block = _one_of(fields, "strategy", strategy, blocks)
        layout: Layout = "integers" if unpacked else "compressed-tensors"
        scheme = Scheme("int4" if bits == 4 else "int8", layout, block, symmetric)
    elif (kind, bits) == ("float", 4):
        fields.only("block_structure", None)
        fields.only("symmetric", True)
        blocks = {"tensor_group": (1, NVFP4_GROUP), "group": (1, MX_GROUP)}
        block = _one_of(fields, "strategy", strategy, blocks)
        fields.only("group_size", block[1])
        scheme = Scheme("nvfp4" if strategy == "tensor_group" else "mxfp4", "compressed-tensors", block)
    else:
        raise BadCheckpoint(
            f"{fields.where} should be float or int of 4 or 8 bits, they are {quoted(kind)} of {quoted(bits)}; other "
            "weights are not implemented; quantize with a preset such as W4A16, W8A16 or FP8_DYNAMIC, or export the "
            "checkpoint that is not quantized"
        )
    fields.finish()
    return scheme


def _inputs(fields: Fields) -> tuple[Any, int]:
    fields.only("type", "float")
    fields.only("num_bits", 8)
    fields.only("symmetric", True)
    fields.only("block_structure", None)
    fields.skip(*_SEARCHED)
    dynamic, strategy, group = fields.flag("dynamic", False), fields.get("strategy"), fields.get("group_size")
    fields.finish()
    if dynamic and strategy == "tensor":
        raise BadCheckpoint(
            f"{fields.where}: a dynamic scale per tensor would let the requests of a batch change one another; "
            "quantize with dynamic scales per token, or with static scales"
        )
    if dynamic and strategy == "group":
        return "token", Fields({"group_size": group}, fields.where).integer("group_size")
    if (dynamic, strategy) in ((True, "token"), (False, "tensor")):
        return "token" if dynamic else "static", FULL_DIM
    raise BadCheckpoint(
        f"{fields.where}: strategy should be token or group (dynamic) or tensor (static), it is {quoted(strategy)} "
        f"with dynamic {dynamic}"
    )


def _unrounded(fields: Fields) -> str:
    """Return the format of inputs that a build leaves unquantized."""
    kind, bits = fields.get("type", "int"), fields.get("num_bits", 8)
    fields.only("type", "int", "float")
    fields.only("num_bits", 4, 8)
    fields.skip("symmetric", "strategy", "dynamic", "group_size", "block_structure", *_SEARCHED)
    fields.finish()
    return f"{bits}-bit {'integers' if kind == 'int' else 'floats'}"


def _block(fields: Fields) -> tuple[int, int]:
    sizes = fields.get("block_structure", [128, 128])
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)):
        raise BadCheckpoint(f"{fields.where}: block_structure should be two integers, it is {quoted(sizes)}")
    return sizes[0], sizes[1]


def _one_of(fields: Fields, name: str, value: Any, known: dict[str, tuple[int, int]]) -> tuple[int, int]:
    if not isinstance(value, str) or value not in known:
        raise BadCheckpoint(f"{fields.where}: {name} should be one of {', '.join(known)}, it is {quoted(value)}")
    return known[value]


def _named(patterns: Sequence[str], where: str) -> Callable[..., bool]:
    """Return a test of a module's names: exact names, "Linear", or "re:" and an expression for the start of a name."""
    expressions = [compile_pattern(each.removeprefix("re:"), where) for each in patterns if each.startswith("re:")]
    listed, linear = set(patterns), "Linear" in patterns
    named = any_name(lambda module: module in listed or any(each.match(module) for each in expressions))
    return lambda *names: (linear and EMBEDDING not in names) or named(*names)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{where} should be an object, it is {quoted(value)}")
    return value
