"""Weights of 4 bits by GPTQ (AutoGPTQ, GPTQModel) and AWQ (AutoAWQ)."""

from typing import Any

from tandemrt.export.read.fields import Fields
from tandemrt.export.read.quantization.names import layers_but, parts_of, strings
from tandemrt.export.read.quantization.scheme import GROUPS, Layout, Quantization, Scheme

# Of GPTQ: how the numbers were found, and by which tool.
_SEARCHED = (
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "meta", "model_name_or_path"),
    *("model_file_base_name", "dataset", "batch_size", "tokenizer", "act_group_aware", "mse", "model_seqlen"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "backend", "pad_token_id", "max_input_length"),
    *("cache_block_outputs", "use_cuda_fp16", "use_exllama", "exllama_config", "disable_exllama", "desc_act"),
)


def read_gptq(said: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config of GPTQ. Raises BadCheckpoint, by name, for what is not understood.

    Columns in another order (desc_act) are known by g_idx, which whoever reads the tensors looks at.
    """
    fields = Fields(said, where)
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
    layout: Layout = "gptq_v2" if "gptq_v2" in (said.get("checkpoint_format"), said.get("format")) else "gptq"
    block = (1, fields.integer("group_size", 128))
    fields.finish()
    scheme = Scheme("int4", layout, block, symmetric)
    return Quantization("gptq", ((layers_but(lambda _: False, head=head), scheme),))


def read_awq(said: dict[str, Any], where: str) -> Quantization:
    """Read a quantization_config of AWQ. Raises BadCheckpoint, by name, for what is not understood."""
    fields = Fields(said, where)
    fields.skip("quant_method", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len")
    fields.only("bits", 4)
    fields.only("version", "gemm")
    fields.only("group_size", *GROUPS)
    fields.only("modules_to_fuse", None)
    zero_point = fields.flag("zero_point", True)
    left = strings(fields, "modules_to_not_convert")
    block = (1, fields.integer("group_size", 128))
    fields.finish()
    return Quantization("awq", ((layers_but(parts_of(left)), Scheme("int4", "awq", block, not zero_point)),))
