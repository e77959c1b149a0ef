"""Read a config of AMD's Quark: FP8 with a scale per tensor or output, or MXFP4; patterns may give modules their own.

https://github.com/amd/Quark (quark/torch/export, quark/torch/quantization/config)
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.module_patterns import any_name, compile_pattern, matmuls_except, read_strings
from tandemrt.export.read.quantization.mxfp4 import GROUP_SIZE as MX_GROUP
from tandemrt.export.read.quantization.scheme import FULL_DIM, Quantization, Scheme

# Settings of the calibration, and symmetric, which does not affect floats.
_SEARCHED = (
    *("observer_cls", "round_method", "scale_type", "scale_calculation_mode", "symmetric", "zero_point_type"),
    *("is_scale_quant", "block_size", "enable_buffer_reuse", "max_input_numel", "is_mse_calculation"),
)
_FOLDED = ("awq", "gptq", "smooth", "autosmoothquant", "qronos")  # algorithms that only change the stored weights
_INPUTS = {"fp4": "4-bit floats", "fp6_e2m3": "6-bit floats", "fp6_e3m2": "6-bit floats", "fp8_e4m3": "8-bit floats"}


def read_quark(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config. Raises BadCheckpoint, by name, for unknown fields and values."""
    fields = Fields(config, where)
    fields.skip("quant_method", "version", "quant_mode", "log_severity_level")
    fields.only("softmax_quant_spec", None)
    fields.only("layer_type_quant_config", {})
    fields.only("kv_cache_post_rope", False)
    _require_folded(fields.get("algo_config"), where)
    cached = _read_cached(_object(fields.get("export", {}), f"{where}: export"), f"{where}: export")
    excluded = _matcher(read_strings(fields, "exclude"), where)
    own = _object(fields.get("layer_quant_config", {}), f"{where}: layer_quant_config")
    others = fields.get("global_quant_config")
    caches = _object(fields.get("kv_cache_quant_config", {}), f"{where}: kv_cache_quant_config")
    fields.finish()
    if wrong := [name for name in cached if name not in own] or [name for name in caches if name not in cached]:
        raise BadCheckpoint(
            f"{where}: kv_cache_group, {quoted(cached)}, should name patterns of layer_quant_config and all of "
            f"kv_cache_quant_config; {quoted(wrong[0])} is not in both; export the model again with Quark"
        )
    rules: list[tuple[Callable[..., bool], Scheme]] = []
    matchers: list[Callable[..., bool]] = [excluded]
    for pattern, settings in own.items():
        scheme = _scheme(settings, f"{where}: layer_quant_config, {pattern}", cached=pattern in cached)
        matches = _matcher((pattern,), where)
        rules.append((partial(_is_first, matches, tuple(matchers)), scheme))
        matchers.append(matches)
    left = matmuls_except(lambda *names: any(matches(*names) for matches in matchers), head=True)
    rules.append((left, _scheme(others, f"{where}: global_quant_config")))
    return Quantization("quark", tuple(rules), float8_cache=bool(cached))


def _is_first(matches: Callable[..., bool], earlier: Sequence[Callable[..., bool]], *names: str) -> bool:
    others = matmuls_except(lambda *each: not matches(*each) or any(one(*each) for one in earlier), head=True)
    return others(*names)


def _scheme(settings: Any, where: str, *, cached: bool = False) -> Scheme:
    """Read how modules are quantized. ``cached``: their outputs are keys or values in float8 with a static scale."""
    fields = Fields(_object(settings, where), where)
    fields.only("bias", None)
    fields.skip("target_device")
    weight, inputs, outputs = (fields.get(name) for name in ("weight", "input_tensors", "output_tensors"))
    fields.finish()
    if cached:
        _require_static(Fields(_object(outputs, f"{where}: output_tensors"), f"{where}: output_tensors"))
    elif outputs is not None:
        raise BadCheckpoint(
            f"{where}: output_tensors is {quoted(outputs)}, which the exporter implements for the kv_cache_group only; "
            "quantize the model without it"
        )
    if isinstance(weight, list):
        raise BadCheckpoint(
            f"{where}: weight is rounded {len(weight)} times, such as to INT4 and FP8, which the exporter does not "
            "implement; quantize the model to FP8 or MXFP4, or export the checkpoint that is not quantized"
        )
    weights = Fields(_object(weight, f"{where}: weight"), f"{where}: weight")
    if weights.get("dtype") == "fp4":
        return _mxfp4(weights, inputs, where)
    if weights.get("dtype") == "fp8_e4m3":
        return _float8(weights, inputs, where)
    raise BadCheckpoint(
        f"{weights.where}: dtype is {quoted(weights.get('dtype'))}, which the exporter does not implement; supported: "
        "'fp8_e4m3', 'fp4'; quantize the model to FP8 or MXFP4, or export the checkpoint that is not quantized"
    )


def _float8(fields: Fields, inputs: Any, where: str) -> Scheme:
    fields.only("qscheme", "per_tensor", "per_channel")
    by_output = fields.get("qscheme") == "per_channel"
    if by_output:
        fields.only("ch_axis", 0)
    fields.skip("ch_axis")
    fields.only("group_size", None)
    _finish_weight(fields, scale_formats=(None, "float", "float32", "bf16"))
    block = (1, FULL_DIM) if by_output else (FULL_DIM, FULL_DIM)
    scheme = Scheme("float8_e4m3fn", "modelopt", block)
    if inputs is None:
        return scheme
    activations = Fields(_object(inputs, f"{where}: input_tensors"), f"{where}: input_tensors")
    if not activations.flag("is_dynamic", False):
        _require_static(activations)
        return Scheme("float8_e4m3fn", "modelopt", block, inputs="static")
    if activations.get("qscheme") == "per_tensor":
        raise BadCheckpoint(
            f"{activations.where}: a dynamic scale per tensor would let the requests of a batch change one another; "
            "quantize with dynamic scales per channel, or with static scales"
        )
    activations.only("dtype", "fp8_e4m3")
    activations.only("qscheme", "per_channel")  # along axis 1 of [tokens, inputs] or the last: a scale per token
    activations.only("ch_axis", 1, -1)
    activations.only("group_size", None)
    activations.skip("scale_format", "mx_element_dtype", *_SEARCHED)
    activations.finish()
    return Scheme("float8_e4m3fn", "modelopt", block, inputs="token")


def _mxfp4(fields: Fields, inputs: Any, where: str) -> Scheme:
    fields.only("qscheme", "per_group")
    fields.only("ch_axis", -1, 1)
    fields.only("group_size", MX_GROUP)
    _finish_weight(fields, scale_formats=("e8m0",))
    if inputs is None:
        return Scheme("mxfp4", "modelopt", (1, MX_GROUP))
    activations = Fields(_object(inputs, f"{where}: input_tensors"), f"{where}: input_tensors")
    activations.only("dtype", *_INPUTS)
    dtype = activations.get("dtype", "fp4")
    activations.skip("qscheme", "ch_axis", "group_size", "is_dynamic", "scale_format", "mx_element_dtype", *_SEARCHED)
    activations.finish()
    return Scheme("mxfp4", "modelopt", (1, MX_GROUP), unrounded=_INPUTS[dtype])


def _finish_weight(fields: Fields, *, scale_formats: tuple[Any, ...]) -> None:
    fields.only("scale_format", *scale_formats)
    fields.only("is_dynamic", False)
    fields.only("mx_element_dtype", None)
    fields.skip(*_SEARCHED)
    fields.finish()


def _require_static(fields: Fields) -> None:
    """Raise BadCheckpoint unless values are rounded to float8 with one stored scale."""
    fields.only("dtype", "fp8_e4m3")
    fields.only("qscheme", "per_tensor")
    fields.only("is_dynamic", False)
    fields.skip("ch_axis", "group_size", "scale_format", "mx_element_dtype", *_SEARCHED)
    fields.finish()


def _read_cached(export: dict[str, Any], where: str) -> tuple[str, ...]:
    """Return the patterns of the modules whose outputs are keys and values in float8."""
    fields = Fields(export, where)
    # pack_method is the order of integers; kv scales below min_kv_scale were raised before they were written.
    fields.skip("pack_method", "min_kv_scale", "weight_merge_groups")
    fields.only("weight_format", "real_quantized")
    cached = read_strings(fields, "kv_cache_group")
    fields.finish()
    return cached


def _require_folded(algorithms: Any, where: str) -> None:
    """Raise BadCheckpoint for algorithms of ``algo_config`` that also change what matmuls read, such as rotations."""
    for each in algorithms if isinstance(algorithms, list) else [] if algorithms is None else [algorithms]:
        name = _object(each, f"{where}: algo_config").get("name")
        if name not in _FOLDED:
            raise BadCheckpoint(
                f"{where}: algo_config has {quoted(name)}, which may change the inputs of matmuls at run time; "
                f"supported: {', '.join(_FOLDED)}; quantize the model without it"
            )


def _matcher(patterns: Sequence[str], where: str) -> Callable[..., bool]:
    """Return a test of a module's names: names with wildcards, or "re:" and an expression for the start of a name."""
    expressions = [compile_pattern(each.removeprefix("re:"), where) for each in patterns if each.startswith("re:")]
    names = [each for each in patterns if not each.startswith("re:")]
    return any_name(
        lambda module: any(fnmatchcase(module, each) for each in names) or any(e.match(module) for e in expressions)
    )


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{where} should be an object, it is {quoted(value)}")
    return value
