"""Reading a Hugging Face config: every field is used, known to have no effect, or rejected by name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.families.registry import FAMILIES
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.unsupported import UNSUPPORTED
from tests.plain.published_architectures import EARLIER, TEXT

CONFIGS = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
}


def config(architecture="LlamaForCausalLM", **fields):
    """Return a config as transformers saves it, with some fields changed."""
    return CONFIGS[architecture]().to_dict() | {"architectures": [architecture]} | fields


@pytest.mark.parametrize("architecture", CONFIGS)
def test_all_config_fields_written_by_transformers_are_accepted(architecture):
    spec = ModelSpec.from_hf(config(architecture))
    defaults = CONFIGS[architecture]()
    assert (spec.hidden, spec.layers, spec.vocab) == (
        defaults.hidden_size,
        defaults.num_hidden_layers,
        defaults.vocab_size,
    )
    assert (spec.qkv_bias, bool(spec.qk_norm)) == (architecture.startswith("Qwen2"), architecture.startswith("Qwen3"))


def test_published_llama_3_1_config_is_read():
    spec = ModelSpec.from_hf({
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
    })  # fmt: skip
    assert (spec.family, spec.head_dim, spec.kv_heads, spec.max_length) == ("llama", 128, 8, 131072)
    assert (spec.rope.kind, spec.rope.theta, spec.sliding_window) == ("llama3", 500000.0, None)


def test_published_qwen2_5_config_disables_the_sliding_window():
    spec = ModelSpec.from_hf({
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
    })  # fmt: skip
    assert (spec.family, spec.head_dim, spec.qkv_bias, spec.out_bias, spec.sliding_window) == (
        "qwen2",
        128,
        True,
        False,
        None,
    )


@pytest.mark.parametrize("field", ["num_key_value_heads", "head_dim", "tie_word_embeddings"])
def test_an_absent_field_has_the_default_of_transformers(field):
    fields = config(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=20, rms_norm_eps=0.05)
    del fields[field]
    spec, known = ModelSpec.from_hf(fields), LlamaConfig.from_dict(fields)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (4, known.num_key_value_heads, known.head_dim)
    assert (spec.tied, spec.norm_eps) == (known.tie_word_embeddings, known.rms_norm_eps)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1_000_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.5,
        },
        *(
            {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                one_of_two: 0.7,
            }
            for one_of_two in ("mscale", "mscale_all_dim")
        ),
    ],
)
def test_rotary_frequencies_differ_from_those_of_transformers_by_the_last_bit_at_most(rope, head_dim):
    fields = {"hidden_size": 64, "intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": head_dim, "rope_parameters": rope}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**fields, max_position_embeddings=131072))
    spec = ModelSpec.from_hf(config(**fields, max_position_embeddings=131072))
    embedding = model.model.rotary_emb
    ours, expected = np.float32(spec.rope.frequencies), embedding.inv_freq.numpy()
    np.testing.assert_array_max_ulp(ours, expected, maxulp=1)  # torch does not round all powers exactly
    assert np.mean(ours == expected) > 0.9
    assert spec.rope.magnitude == embedding.attention_scaling


def test_an_absent_yarn_factor_is_the_ratio_of_the_lengths():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    without, named = (
        ModelSpec.from_hf(config(max_position_embeddings=131072, rope_parameters=parameters)).rope
        for parameters in (rope, rope | {"factor": 32.0})
    )
    assert (without.frequencies, without.magnitude) == (named.frequencies, named.magnitude)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM is not exported: its positions are"),
        ({"architectures": ["Unheard"]}, "Unheard is not exported: it is none of .* that docs/models.md lists"),
        ({"architectures": ["A", "B"]}, "architectures should be one of those that docs/models.md lists.*'B'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "computes classes or scores, not the next token"),
        ({"architectures": ["InternLM2ForRewardModel"]}, "computes classes or scores, not the next token"),
        ({"architectures": ["MistralModel"]}, "computes embeddings, not the next token"),
        ({"architectures": ["XLMWithLMHeadModel"]}, "is not exported: it is none of"),
        ({"is_causal": False}, "is_causal is False.*supported: True"),
        ({"model_type": "qwen3"}, "with model_type 'qwen3'"),
        ({"architectures": None, "model_type": "mamba"}, "with model_type 'mamba'"),
        ({"logit_softcapping": 30.0}, r"does not support the field\(s\) 'logit_softcapping'"),
        ({"use_mrope": True}, "use_mrope is True.*supported: False"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True.*supported: False"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"cross_attention_hidden_size": 64}, "cross_attention_hidden_size is 64.*supported: None"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is .*supported: {}"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types should say full_attention for every layer"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}}, "auto_map names .*XForCausalLM"),
        ({"auto_map": "x"}, "auto_map names the checkpoint's own code"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*supported: 'silu', 'swish'"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"sliding_window": 512}, "sliding_window is 512"),
        ({"hidden_size": "4096"}, "hidden_size should be an integer of at least 1, it is '4096'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers should be an integer"),
        ({"vocab_size": True}, "vocab_size should be an integer"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps should be a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings should be true or false"),
        ({"head_dim": 63}, "head_dim should be even .* it is 63"),
        ({"num_key_value_heads": 5}, "multiple of num_key_value_heads, got 32, 5"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "short_factor should be 64 numbers above 0, one for each rotated pair, it is None",
        ),
        ({"rope_parameters": {"rope_type": "wave", "factor": 2.0}}, "rope_type is 'wave'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters: factor should be a number above 0"),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_parameters: factor should be a number above 0, it is missing",
        ),
        ({"rope_parameters": {"rope_type": "default", "twist": 1}}, r"rope_parameters: .*does not support.*twist"),
        ({"rope_parameters": [1]}, "rope_parameters should be an object"),
    ],
)
def test_unknown_fields_and_values_are_rejected_by_name_and_value(fields, message):
    with pytest.raises(BadCheckpoint, match=message):
        ModelSpec.from_hf(config(**fields))


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps"]
)
def test_a_missing_field_is_named(field):
    fields = config()
    del fields[field]
    with pytest.raises(BadCheckpoint, match=f"{field} should be .* it is missing"):
        ModelSpec.from_hf(fields)


def test_absent_head_sizes_have_the_defaults_of_transformers():
    fields = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
    for architecture, size in (("LlamaForCausalLM", 64), ("Qwen3ForCausalLM", 128)):
        silent = config(architecture, **fields)
        silent.pop("head_dim", None)
        theirs = CONFIGS[architecture].from_dict(silent)
        assert ModelSpec.from_hf(silent).head_dim == theirs.head_dim == size
    ungrouped = ModelSpec.from_hf(config(**fields | {"num_key_value_heads": None}))
    assert ungrouped.kv_heads == LlamaConfig(**fields | {"num_key_value_heads": None}).num_key_value_heads == 16


def test_yarn_without_a_factor_extends_the_trained_length_to_the_models():
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "original_max_position_embeddings": 32768}
    ropes = [
        ModelSpec.from_hf(config(max_position_embeddings=131072, rope_parameters=rope)).rope
        for rope in (yarn, yarn | {"factor": 4.0}, yarn | {"factor": 1.0})
    ]
    assert ropes[0] == ropes[1] != ropes[2]


def test_sliding_windows_are_read_for_families_that_have_them():
    assert ModelSpec.from_hf(config("MistralForCausalLM", sliding_window=4096)).sliding_window == 4096
    assert ModelSpec.from_hf(config("MistralForCausalLM", sliding_window=None)).sliding_window is None
    silent = config("MistralForCausalLM")
    del silent["sliding_window"]
    assert ModelSpec.from_hf(silent).sliding_window == MistralConfig.from_dict(silent).sliding_window == 4096
    qwen3 = {"architecture": "Qwen3ForCausalLM", "use_sliding_window": True, "layer_types": None}
    assert ModelSpec.from_hf(config(**qwen3, sliding_window=512)).sliding_window == 512
    with pytest.raises(BadCheckpoint, match="sliding_window should be an integer"):
        ModelSpec.from_hf(config(**qwen3))
    with pytest.raises(BadCheckpoint, match=r"layer_types should name .*linear_attention"):
        ModelSpec.from_hf(config("Qwen3ForCausalLM", layer_types=["linear_attention"] * 32))
    for entries in (3, 33):
        with pytest.raises(BadCheckpoint, match=rf"for each of 32 layers, it has {entries} entries"):
            ModelSpec.from_hf(config("Qwen3ForCausalLM", layer_types=["full_attention"] * entries))


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    "fields",
    [
        {"max_window_layers": 2},
        {"use_sliding_window": False},
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
        {"layer_types": ["full_attention"] * 4},
    ],
)
def test_layers_with_a_sliding_window_match_transformers(architecture, fields):
    fields = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 512} | fields
    theirs = CONFIGS[architecture](**fields)
    spec = ModelSpec.from_hf({"architectures": [architecture], **config(architecture, layer_types=None), **fields})
    expected = tuple(kind == "sliding_attention" for kind in theirs.layer_types)
    assert (spec.sliding_layers, spec.sliding_window) == (expected, 512 if any(expected) else None)


# Fields of published configs of these families that have no effect.
PUBLISHED = [
    {"unsloth_fixed": True, "unsloth_version": "2025.1.5"},
    {"_attn_implementation_autoset": True},
    {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": {}}},
    {"use_mrope": False},
    {"tokenizer_class": "PreTrainedTokenizerFast", "neftune_noise_alpha": 5, "torchscript": False},
    {"max_length": 20, "temperature": 1.0, "top_k": 50, "do_sample": False, "pruned_heads": {}, "is_decoder": False},
    {"tie_encoder_decoder": False, "use_bfloat16": False, "tf_legacy_loss": False, "cross_attention_hidden_size": None}
    | {"is_encoder_decoder": False, "add_cross_attention": False},
    {"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None], "AutoConfig": "configuration_x.XConfig"}},
    {"pard_token": 128255},
    {"_model_name_or_path": "", "unk_token_id": 0, "internal_version": "7b-alpha-v2", "a_field_of_another_kind": None},
    {"_num_mtp_layers": 1, "mtp_share_layers": True, "mtp_loss_scaling_factor": 0.05},
    {"use_sliding_window": False, "layer_types": ["full_attention"] * 32},
]


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("fields", PUBLISHED, ids=lambda fields: next(iter(fields)))
def test_published_fields_without_effect_leave_the_spec_unchanged(architecture, fields):
    plain = config(architecture) | ({"sliding_window": None} if architecture == "MistralForCausalLM" else {})
    assert ModelSpec.from_hf(plain | fields) == ModelSpec.from_hf(plain)


def test_custom_code_is_accepted_if_its_class_has_the_familys_name():
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}}
    assert ModelSpec.from_hf(config(**code)) == ModelSpec.from_hf(config())


def test_fields_may_repeat_the_defaults_of_a_family():
    assert ModelSpec.from_hf(config("Qwen2ForCausalLM", attention_bias=True)).qkv_bias
    with pytest.raises(BadCheckpoint, match="attention_bias is False"):
        ModelSpec.from_hf(config("Qwen2ForCausalLM", attention_bias=False))
    sliding = {"sliding_window": 4096, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 32}
    assert all(ModelSpec.from_hf(config("MistralForCausalLM", **sliding)).sliding_layers)
    with pytest.raises(BadCheckpoint, match="layer_types should say sliding_attention for every layer"):
        ModelSpec.from_hf(config("MistralForCausalLM", **sliding | {"layer_types": ["full_attention"] * 32}))


def test_all_unknown_fields_are_named_at_once_and_accepted_by_name():
    odd = {f"odd_{i}": i for i in range(300)}
    with pytest.raises(BadCheckpoint) as refused:
        ModelSpec.from_hf(config(**odd))
    assert all(f"'{name}'" in str(refused.value) for name in odd)
    assert "ignore_config_fields = [...]" in str(refused.value)
    assert ModelSpec.from_hf(config(**odd), ignored=tuple(odd)) == ModelSpec.from_hf(config())


@pytest.mark.parametrize("name", ["odd", "hidden_size", "unsloth_fixed"])
def test_only_present_unknown_fields_can_be_ignored(name):
    with pytest.raises(BadCheckpoint, match=f"ignore_config_fields names {name}.*take it out of the recipe"):
        ModelSpec.from_hf(config(unsloth_fixed=True), ignored=(name,))


def test_dual_chunk_attention_limits_texts_to_one_chunk():
    """The config of Qwen2.5-1M; within one chunk, dual-chunk attention equals ordinary attention."""
    chunked = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    long = config("Qwen2ForCausalLM", max_position_embeddings=1010000)
    spec = ModelSpec.from_hf(long | {"dual_chunk_attention_config": chunked})
    assert (spec.max_length, replace(spec, max_length=1010000)) == (253952, ModelSpec.from_hf(long))
    for wrong in ({"local_size": 262144}, {"chunk_size": None}, {"sparse": True}):
        with pytest.raises(BadCheckpoint, match="dual_chunk_attention_config"):
            ModelSpec.from_hf(long | {"dual_chunk_attention_config": chunked | wrong})


@pytest.mark.parametrize("architecture", UNSUPPORTED)
def test_unsupported_architectures_are_rejected_with_the_reason(architecture):
    with pytest.raises(BadCheckpoint, match=f"{architecture} is not exported: .*; choose another model"):
        ModelSpec.from_hf(config(architectures=[architecture], model_type="any"))
    assert architecture not in FAMILIES
    assert architecture in (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_no_published_text_model_is_rejected_with_a_general_message():
    assert not {*TEXT, *EARLIER} - {*FAMILIES, *UNSUPPORTED}


def test_most_published_text_models_are_read():
    """Also the number in docs/models.md."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert f"{len(TEXT & {*FAMILIES})} of the {len(TEXT)} text models of vLLM 0.33" in page


def test_yarn_extends_the_length_beyond_max_position_embeddings():
    """D5: the form that the model cards of Qwen2.5 and Qwen3 recommend."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    card = config("Qwen3ForCausalLM", max_position_embeddings=40960, rope_scaling=yarn)
    del card["rope_parameters"]
    assert ModelSpec.from_hf(card).max_length == 131072
    assert ModelSpec.from_hf(card | {"max_position_embeddings": 262144}).max_length == 262144
    del yarn["original_max_position_embeddings"]
    assert ModelSpec.from_hf(card | {"max_position_embeddings": 32768, "rope_scaling": yarn}).max_length == 131072
