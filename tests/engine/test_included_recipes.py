"""The included recipes for a CPU build a model with the published config, whose text is the same without drafts.

The configs are those of the hub, with fewer layers and narrower matrices.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe, locate
from tandemrt.export.bundle.build import build
from tests.makers import VOCAB, tiny_tokenizer

PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 64,
        "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0,
        "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": True,
    },
    "smollm3-3b": {
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "hidden_act": "silu", "initializer_range": 0.02, "layer_types": ["full_attention"] * 4,
        "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "pretraining_tp": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0.dev0", "use_cache": True, "use_sliding_window": False,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02,
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0", "use_cache": True,
    },
}  # fmt: skip
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": 263, "pad_token_id": 262,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_for_a_cpu_builds_its_model(name: str, tmp_path: Path) -> None:
    folder = tiny_tokenizer(tmp_path / "checkpoint")
    config = PUBLISHED[name] | SMALL
    (folder / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))  # save_pretrained writes fields of its own version
    recipe = Recipe.load(locate(name))
    assert (recipe.target.dtype, recipe.backend.name, recipe.draft.kind) == ("int4", "onnxruntime-cpu", "ngram")
    assert recipe.hub_name(recipe.target.checkpoint)
    recipe = recipe.model_copy(update={"target": recipe.target.model_copy(update={"checkpoint": folder})})
    bundle = build(recipe, tmp_path / "bundle").folder
    prompt = [{"role": "user", "content": "one two one two one two one two"}]
    common = {"temperature": 0, "ignore_eos": True, "max_tokens": 100}
    with LLM(bundle, threads=1) as llm:
        drafted, without = (llm.generate(prompt, SamplingParams(**common, num_draft_tokens=k)) for k in (4, 0))
    assert drafted.token_ids == without.token_ids
    assert drafted.speculation.num_draft_tokens > 0
