"""Read the configs of GPTQ (AutoGPTQ, GPTQModel) and AWQ (AutoAWQ): weights of 4 bits."""

from typing import Any

from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.module_patterns import match_name_parts, matmuls_except, read_strings
from tandemrt.export.read.quantization.scheme import GROUPS, Layout, Quantization, Scheme

# GPTQ: settings of the calibration and of the tool.
_SEARCHED = (
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "meta", "model_name_or_path"),
    *("model_file_base_name", "dataset", "batch_size", "tokenizer", "act_group_aware", "mse", "model_seqlen"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "backend", "pad_token_id", "max_input_length"),
    *("cache_block_outputs", "use_cuda_fp16", "use_exllama", "exllama_config", "disable_exllama", "desc_act"),
)


def read_gptq(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config of GPTQ. Raises BadCheckpoint, by name, for unknown fields and values.

    A reordering of columns (desc_act) shows in the tensor g_idx, which the reader of the tensors checks.
    """
    fields = Fields(config, where)
    fields.skip("quant_method", *_SEARCHED)
    fields.only("bits", 4)
    fields.only("group_size", *GROUPS)
    fields.only("checkpoint_format", "gptq", "gptq_v2")
    fields.only("format", "gptq", "gptq_v2")
    fields.only("pack_dtype", "int32")
    fields.only("is_marlin_format", False)
    fields.only("dynamic", None, {})
    fields.only("modules_in_block_to_quantize", None)
    symmetric = fields.flag("sym", True)
    head = fields.flag("lm_head", False)
    layout: Layout = "gptq_v2" if "gptq_v2" in (config.get("checkpoint_format"), config.get("format")) else "gptq"
    block = (1, fields.integer("group_size", 128))
    fields.finish()
    scheme = Scheme("int4", layout, block, symmetric)
    return Quantization("gptq", ((matmuls_except(lambda _: False, head=head), scheme),))


def read_awq(config: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config of AWQ. Raises BadCheckpoint, by name, for unknown fields and values."""
    fields = Fields(config, where)
    fields.skip("quant_method", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len")
    fields.only("bits", 4)
    fields.only("version", "gemm")
    fields.only("group_size", *GROUPS)
    fields.only("modules_to_fuse", None)
    zero_point = fields.flag("zero_point", True)
    ignored = read_strings(fields, "modules_to_not_convert")
    block = (1, fields.integer("group_size", 128))
    fields.finish()
    return Quantization(
        "awq", ((matmuls_except(match_name_parts(ignored)), Scheme("int4", "awq", block, not zero_point)),)
    )
