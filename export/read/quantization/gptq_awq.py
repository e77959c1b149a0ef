"""Read the configs of GPTQ (AutoGPTQ, GPTQModel), AWQ (AutoAWQ) and AutoRound: integers of 4 or 8 bits.

AutoRound stores weights as GPTQ or AWQ does: https://github.com/intel/auto-round (export/export_to_autoround).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import eq
from typing import Any, Literal

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.module_patterns import (
    EMBEDDING,
    any_name,
    compile_pattern,
    match_name_parts,
    matmuls_except,
    read_strings,
)
from tandemrt.export.read.quantization.scheme import BITS, FULL_DIM, GROUPS, Layout, Quantization, Scheme

# GPTQ: settings of the calibration and of the tool.
_SEARCHED = (
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "meta", "model_name_or_path"),
    *("model_file_base_name", "dataset", "batch_size", "tokenizer", "act_group_aware", "mse", "model_seqlen"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "backend", "pad_token_id", "max_input_length"),
    *("cache_block_outputs", "use_cuda_fp16", "use_exllama", "exllama_config", "disable_exllama", "desc_act"),
)

# AutoRound: settings of the search and of the tool; extra_config names unquantized modules.
_AUTO_ROUND = (
    *("autoround_version", "iters", "nsamples", "seqlen", "batch_size", "lr", "minmax_lr", "amp", "low_gpu_mem_usage"),
    *("enable_quanted_input", "enable_minmax_tuning", "gradient_accumulate_steps", "dataset", "scale_dtype", "backend"),
    *("block_name_to_quantize", "to_quant_block_names", "quant_block_list", "model_free", "act_data_type", "act_sym"),
    *(
        "act_group_size",
        "act_dynamic",
        "super_bits",
        "super_group_size",
        "enable_norm_bias_tuning",
        "low_cpu_mem_usage",
    ),
    *("enable_alg_ext", "supported_types", "static_kv_dtype", "static_attention_dtype"),
)
_PACKINGS: Mapping[str, Layout] = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}


def read_gptq(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config of GPTQ. Raises BadCheckpoint, by name, for unknown fields and values.

    A reordering of columns (desc_act) shows in the tensor g_idx, which the reader of the tensors checks.
    """
    fields = Fields(config, where)
    fields.skip("quant_method", *_SEARCHED)
    fields.only("bits", 4, 8)
    fields.only("checkpoint_format", "gptq", "gptq_v2")
    fields.only("format", "gptq", "gptq_v2")
    fields.only("pack_dtype", "int32")
    fields.only("is_marlin_format", False)
    fields.only("modules_in_block_to_quantize", None)
    symmetric = fields.flag("sym", True)
    head = fields.flag("lm_head", False)
    layout: Layout = "gptq_v2" if "gptq_v2" in (config.get("checkpoint_format"), config.get("format")) else "gptq"
    scheme = Scheme(_integers(fields), layout, _groups(fields), symmetric)
    named = _dynamic(fields.get("dynamic", {}), scheme, where)
    fields.finish()
    rules: list[tuple[Callable[..., bool], Scheme]] = []
    for index, (_, other) in enumerate(named):
        if other is not None:
            rules.append((partial(_is_first, named, index), other))
    others = matmuls_except(any_name(lambda module: any(matches(module) for matches, _ in named)), head=head)
    return Quantization("gptq", (*rules, (others, scheme)))


_Named = Sequence[tuple[Callable[[str], Any], Scheme | None]]


def _dynamic(settings: Any, scheme: Scheme, where: str) -> _Named:
    """Read ``dynamic`` of GPTQModel: expressions of module names, with other settings, or "-:" for unquantized ones.

    The first that matches the beginning of a name counts.
    """
    if not isinstance(settings, dict) or not all(isinstance(each, dict) for each in settings.values()):
        raise BadCheckpoint(f"{where}: dynamic should map expressions to objects, it is {quoted(settings)}")
    named: list[tuple[Callable[[str], Any], Scheme | None]] = []
    for name, changes in settings.items():
        sign, expression = (name[:2], name[2:]) if name.startswith(("-:", "+:")) else ("", name)
        other = None
        if sign != "-:":
            own = Fields({"bits": BITS[scheme.weight], "group_size": -1, **changes}, f"{where}: dynamic, {name}")
            own.skip("desc_act", "mse", "damp_percent", "static_groups")
            symmetric = own.flag("sym", scheme.symmetric)
            groups = _groups(own) if "group_size" in changes else scheme.group_shape
            own.skip("group_size")
            other = Scheme(_integers(own), scheme.layout, groups, symmetric)
            own.finish()
        named.append((compile_pattern(expression, where).match, other))
    return named


def _is_first(named: _Named, index: int, *names: str) -> bool:
    """Whether ``index`` is the first of the expressions that match a module."""
    first = next((i for i, (matches, _) in enumerate(named) if any(map(matches, names))), None)
    return EMBEDDING not in names and first == index


def read_awq(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config of AWQ. Raises BadCheckpoint, by name, for unknown fields and values."""
    fields = Fields(config, where)
    fields.skip("quant_method", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len")
    fields.only("bits", 4)
    fields.only("version", "gemm", "gemv")
    fields.only("modules_to_fuse", None)
    zero_point = fields.flag("zero_point", True)
    ignored = read_strings(fields, "modules_to_not_convert")
    layout: Layout = "awq_gemv" if fields.get("version") == "gemv" else "awq"
    scheme = Scheme("int4", layout, _groups(fields), not zero_point)
    fields.finish()
    return Quantization("awq", ((matmuls_except(match_name_parts(ignored)), scheme),))


def read_auto_round(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config of AutoRound. Raises BadCheckpoint, by name, for unknown fields and values.

    ``extra_config`` names modules that are unquantized, or have other bits or groups.
    """
    fields = Fields(config, where)
    fields.skip("quant_method", *_AUTO_ROUND)
    fields.only("data_type", "int")
    fields.only("packing_format", *_PACKINGS)
    fields.only("act_bits", 16, 32)
    layout = _PACKINGS[fields.get("packing_format", next(iter(_PACKINGS)))]
    symmetric = fields.flag("sym", True)
    scheme = Scheme(_integers(fields), layout, _groups(fields), symmetric)
    own = fields.get("extra_config", {})
    fields.finish()
    if not isinstance(own, dict) or not all(isinstance(each, dict) for each in own.values()):
        raise BadCheckpoint(f"{where}: extra_config should map modules to objects, it is {quoted(own)}")
    rules: list[tuple[Callable[..., bool], Scheme]] = []
    unquantized = []
    for module, settings in own.items():
        if settings.get("bits", 4) >= 16:
            unquantized.append(module)
            continue
        other = Fields(
            {"bits": config.get("bits"), "group_size": config.get("group_size"), "sym": symmetric} | settings, where
        )
        other.skip(*_AUTO_ROUND, "scale_dtype")
        other.only("data_type", "int")
        other.only("act_bits", 16, 32)
        special = Scheme(_integers(other), layout, _groups(other), other.flag("sym", True))
        other.finish()
        rules.append((any_name(partial(eq, module)), special))
    head = "lm_head" in own and "lm_head" not in unquantized
    rules.append((matmuls_except(any_name(set(unquantized).__contains__), head=head), scheme))
    return Quantization("auto-round", tuple(rules))


def _integers(fields: Fields) -> Literal["int4", "int8"]:
    fields.only("bits", 4, 8)
    return "int8" if fields.get("bits") == 8 else "int4"


def _groups(fields: Fields) -> tuple[int, int]:
    """Return the group shape; a ``group_size`` of -1 is one scale per output."""
    fields.only("group_size", 128, *GROUPS, -1)
    size = fields.get("group_size", 128)
    return (1, FULL_DIM) if size == -1 else (1, size)
