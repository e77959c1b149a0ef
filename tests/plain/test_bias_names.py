"""Which matmuls add a bias, whatever the fields of a config say, against models of transformers without weights."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.spec import ModelSpec
from tests.plain.test_field_effects import CONFIGS, WITH_CLASS

LAYERS = 2
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# transformers has no causal class for these, or does not build them with two layers.
NOT_BUILT = {
    *("GLM-4.1V-9B-Thinking", "Mistral4ForCausalLM", "Step-3.5-Flash", "Gemma4ForCausalLM", "HunYuanMoEV1ForCausalLM"),
    "granite-4.0-micro",
}
NAMES = {
    "qkv_bias": ("q_proj", "qkv_proj", "query_key_value", "c_attn", "k_proj"),
    "out_bias": ("o_proj", "self_attn.dense", "attn.c_proj", "out_proj", "attention.dense"),
    "mlp_bias": ("up_proj", "fc1", "c_fc", "dense_h_to_4h", "gate_proj", "gate_up_proj"),
}
# No published model has these values, or our graphs lack the bias.
REFUSED = {
    "attention_bias True": ("Phi-3-mini-4k-instruct", "Phi-4-mini-instruct"),
    "lm_head_bias True": ("Phi-4-mini-instruct",),
    "mlp_bias True": (
        *("Phi-4-mini-instruct", "Hy-MT2-7B", "DeepSeek-V3.2", "GLM-5.2", "GLM-5.2 as transformers saves it"),
        *("DeepSeek-V2-Lite-Chat", "Apertus-8B-Instruct-2509", "MiniCPM3-4B"),
    ),
    "qkv_bias True": ("Qwen3-Coder-30B-A3B",),
    "use_routing_bias False": ("MiniMax-M2",),
    "use_bias True": ("ERNIE-4.5-21B-A3B-PT",),
    "enable_bias False": ("opt-1.3b",),
    "add_full_attention_sink_bias True": ("MiMo-V2-Flash",),
    "add_swa_attention_sink_bias False": ("MiMo-V2-Flash",),
}
READ = {name: ModelSpec.from_hf(CONFIGS[name]) for name in WITH_CLASS if name not in NOT_BUILT}
WITH_ATTENTION = [name for name, spec in READ.items() if spec.recurrent is None]  # in each layer


def variants(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config of a model with each of its fields of biases either way."""
    config = CONFIGS[name]
    known = CONFIG_MAPPING[config["model_type"]]().to_dict() | config
    for field in [field for field, value in known.items() if "bias" in field and isinstance(value, bool)]:
        yield from ((f"{field} {value}", config | {field: value}) for value in (False, True))


def small(config: dict[str, Any]) -> dict[str, Any]:
    """The config of transformers with few layers and experts. It is a copy: transformers changes what it reads."""
    layers = config["num_hidden_layers"]
    cut = {
        name: value[:LAYERS] if isinstance(value, list) and len(value) == layers else value
        for name, value in config.items()
        if name not in ("model_type", "architectures", "auto_map", "quantization_config")
    }
    return deepcopy(cut) | {"num_hidden_layers": LAYERS} | {name: min(4, cut[name]) for name in COUNTS if name in cut}


@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_the_matmuls_with_a_bias_are_those_of_transformers(name: str) -> None:
    for change, config in variants(name):
        if name in REFUSED.get(change, ()):
            with pytest.raises(BadCheckpoint):
                ModelSpec.from_hf(config)
            continue
        spec = ModelSpec.from_hf(config)
        with torch.device("meta"):
            theirs: Any = CONFIG_MAPPING[config["model_type"]](**small(config))
            weights = AutoModelForCausalLM.from_config(theirs).state_dict()
        for kind, matmuls in NAMES.items():
            expected = any(weight.endswith(f"{matmul}.bias") for weight in weights for matmul in matmuls)
            assert getattr(spec, kind) == expected, (kind, change)
