"""Fields of a config.json that do not change the graph: with any value, or with the values listed here."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

# By reason: fields without effect, with any value.
UNUSED_FIELDS = {
    "provenance": (
        *("architectures", "model_type", "transformers_version", "internal_version"),
        *("_name_or_path", "_model_name_or_path"),
    ),
    "the stored tensors have it": ("dtype", "torch_dtype"),
    "training only": (
        "initializer_range",
        "attention_dropout",
        "neftune_noise_alpha",
        "use_reentrant_checkpointing",
    ),
    "decided by the runtime": ("use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id"),
    "read from the tokenizer's own files": ("tokenizer_class", "sep_token_id", "decoder_start_token_id", "prefix"),
    "return values of Python calls": (
        *("output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate"),
        "torchscript",
    ),
    "classifiers only": ("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"),
    "memory use of another implementation": (
        "chunk_size_feed_forward",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
    ),
    "settings of a runtime in a browser": ("transformers.js_config",),
    "only read to derive layer_types": ("max_window_layers", "_sliding_window_pattern"),
    "MTP layers, which a target does not run": (
        *("num_nextn_predict_layers", "_num_mtp_layers", "mtp_share_layers", "mtp_loss_scaling_factor"),
    ),
    "the mask token of a draft that proposes in parallel": ("pard_token",),
    # transformers wrote these into every config.json before generation_config.json existed.
    "generation settings of transformers": (
        "cache_implementation",
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature"),
        *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty", "bad_words_ids"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "remove_invalid_values"),
        *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
        "exponential_decay_length_penalty",
    ),
}
_UNUSED = frozenset(chain.from_iterable(UNUSED_FIELDS.values()))
UNUSED_PREFIXES = ("unsloth_",)  # notes of a tool that saved a copy

# Field -> values without effect; other values are rejected.
NO_EFFECT_VALUES: Mapping[str, tuple[Any, ...]] = {
    "spd_type": (None, "pard"),  # comes with pard_token; "pard2" would read the target's states
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),  # every model here is one
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "use_bfloat16": (False, True),  # of TensorFlow
    "moe_config": (None,),
    "use_llm_lora": (0,),  # InternVL: the rank of an adapter in the checkpoint
    "tf_legacy_loss": (False,),
    "use_mrope": (False,),  # Qwen2.5's bases: one position per token
    "rope_interleaved": (False,),
    "qk_layer_norms": (False,),  # of Idefics 3 and SmolVLM, as the next one
    "use_resampler": (False,),
    "is_llama_config": (True, False),  # written by nanotron, which also has its own model format
}


def is_unused(name: str) -> bool:
    """Whether a field never changes the graph, with any value."""
    return name in _UNUSED or name.startswith(UNUSED_PREFIXES)


def runs_the_same_model(auto_map: object, architecture: str) -> bool:
    """Whether ``auto_map``, the checkpoint's own code, names no model class other than ``architecture``.

    Entries for configs and tokenizers do not affect the graph.
    """
    if not isinstance(auto_map, Mapping):
        return False
    models = [value for name, value in auto_map.items() if str(name).startswith("AutoModelForCausalLM")]
    return all(isinstance(value, str) and value.rpartition(".")[2] == architecture for value in models)
