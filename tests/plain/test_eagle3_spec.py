"""Reading configs and token maps of EAGLE-3 checkpoints, and errors before anything is built."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.draft_heads import target_ids
from tandemrt.export.read.eagle3 import Eagle3Spec
from tandemrt.export.read.spec import ModelSpec
from tests.eagle3 import LATENT, Head

HEAD = Head(vocab=50, hidden=32, target_layers=8, draft_vocab=20, features=(2, 4, 5))
TARGET = ModelSpec.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
    }
)


def read(config: dict[str, Any], *, layer: dict[str, Any] | None = None, **options: Any) -> Eagle3Spec:
    inner = config.get("transformer_layer_config", config)
    return Eagle3Spec.from_hf(
        config | ({"transformer_layer_config": inner | layer} if layer else {}), TARGET, **options
    )


def test_both_config_forms_give_the_same_spec() -> None:
    """speculators lists layers of the target by their inputs, the flat form by their outputs."""
    flat = replace(HEAD, flat=True)
    assert flat.config()["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    assert read(flat.config()) == read(HEAD.config())
    assert read(HEAD.config()).features == (2, 4, 5)


@pytest.mark.parametrize("named", [[17, 1, 33], [1, 17, 33]])
def test_a_flat_config_lists_layer_outputs_in_any_order(named: list[int]) -> None:
    """SpecForge's config for gpt-oss-120b; without the field the default is 1, N/2 - 1 and N - 4."""
    target = replace(TARGET, layers=36, sliding_layers=(False,) * 36)
    config = replace(HEAD, flat=True).config() | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": named}}
    assert Eagle3Spec.from_hf(config, target).features == (2, 18, 34)
    default = Eagle3Spec.from_hf(config | {"eagle_config": {}}, target)
    assert default.features == tuple(layer + 1 for layer in (1, 36 // 2 - 1, 36 - 4))


def test_other_fields_of_speculators_and_modelopt_are_accepted() -> None:
    package = {
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "dtype": "bfloat16",
        "embed_requires_grad": False,
        "speculators_config": {"algorithm": "eagle3"},
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformers_version": "5.19.0",
    }
    assert read(HEAD.config() | package) == read(HEAD.config())
    modelopt = {"use_aux_hidden_state": True, "use_last_layernorm": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    assert read(replace(HEAD, flat=True).config() | {"eagle_config": modelopt}) == read(HEAD.config())


def test_heads_with_latent_attention_are_read_as_their_writers_mean() -> None:
    """vLLM: inputs of layers, and the normed state is fed back. SpecForge: outputs, and neither norm is optional."""
    vllm = replace(HEAD, latent=LATENT, fc_norm=True, norm_output=True, norm_before_residual=True).config()
    spec = read(vllm)
    assert spec.features == (2, 4, 5)
    assert spec.layer.latent is not None
    assert spec.layer.experts_of(0) is None
    assert all((spec.norm_each_feature, spec.norm_fed_back, spec.norm_residual, spec.norm_before_head))
    specforge = {k: v for k, v in vllm.items() if k not in ("fc_norm", "norm_output", "norm_before_residual")}
    spec = read(specforge | {"architectures": ["DeepseekV3ForCausalLMEagle3"]})
    assert spec.features == (3, 5, 6)
    assert not any((spec.norm_each_feature, spec.norm_fed_back, spec.norm_residual))


@pytest.mark.parametrize(("layers", "ids"), [(32, (2, 16, 29)), (36, (2, 18, 33)), (28, (2, 14, 25)), (8, (2, 4, 5))])
def test_absent_feature_layers_have_the_published_default(layers: int, ids: tuple[int, ...]) -> None:
    config = HEAD.config() | {"eagle_aux_hidden_state_layer_ids": None}
    spec = Eagle3Spec.from_hf(config, replace(TARGET, layers=layers, sliding_layers=(False,) * layers))
    assert spec.features == ids


def test_a_sliding_window_limits_the_length_of_texts() -> None:
    slides = {"layer_types": ["sliding_attention"], "sliding_window": 40, "use_sliding_window": True}
    assert read(HEAD.config(), layer=slides).max_context == 40
    assert read(HEAD.config(), layer={"sliding_window": 2048, "layer_types": ["full_attention"]}).max_context is None


@pytest.mark.parametrize(
    ("changes", "layer", "message"),
    [
        ({}, {"vocab_size": 60}, "vocab_size should be the target's, 50, it is 60; choose a head"),
        ({"target_hidden_size": 64}, {}, "target_hidden_size should be the target's hidden_size, 32, it is 64"),
        ({"draft_vocab_size": 51}, {}, "draft_vocab_size should be at most the target's vocab_size, 50, it is 51"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, {}, "different layers of the target by their inputs, 0..7"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2]}, {}, "it is [2, 2]"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, {}, "should be a list of layers, it is '2'"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 4]}, {}, "0..7"),
        ({"speculators_model_type": "dflash"}, {}, "speculators_model_type is 'dflash', which the exporter does not"),
        ({"transformer_layer_config": 3}, None, "transformer_layer_config should be an object, it is 3"),
        ({"norm_after_fc": True}, {}, "does not support the field(s) 'norm_after_fc'"),
        ({}, {"model_type": "gemma3"}, "architectures should be one of"),
        ({}, {"layer_types": ["sliding_attention"]}, "sliding_window should be an integer, it is None"),
    ],
)
def test_configs_that_do_not_fit_are_rejected(changes: Any, layer: Any, message: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(HEAD.config() | changes, layer=layer)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"norm_output": True, "architectures": ["Eagle3LlamaForCausalLM"]},
            "norm_output is True: in SpecForge it means a norm before lm_head",
        ),
        (
            {"norm_output": False, "architectures": ["Eagle3LlamaForCausalLM"]},
            "norm_output is False: in SpecForge it means a norm before lm_head",
        ),
        ({"norm_output": 1}, "norm_output should be true or false, it is 1"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True, which the exporter does not"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2], "depth": 3}}, "the field(s) 'depth'"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 7]}},
            "different layers of the target by their outputs, -1..6 (tools disagree on 7, the last layer's output)",
        ),
        ({"architectures": ["X"]}, "for an EAGLE-3 head, it is"),
        ({"mask_token_id": 3}, "the field(s) 'mask_token_id'"),
    ],
)
def test_flat_configs_with_another_meaning_are_rejected(changes: Any, message: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(replace(HEAD, flat=True).config() | changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "phi3"},
        {"model_type": "qwen2", "target_model_type": "qwen2_5_vl"},
        {"modal_type": "VLM", "image_token_id": 7},
        {"eod_token_id": 3, "image_start_token_id": 4, "image_end_token_id": 5, "image_newline_token_id": 6},
        {"use_qk_norm": True, "use_cla": False, "norm_type": "rms", "dense_list": [32, 0], "text_end_id": 7},
        {"decoder_sparse_step": 1, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    ],
)
def test_fields_about_the_target_change_nothing(changes: Any) -> None:
    flat = replace(HEAD, flat=True).config()
    assert read(flat | changes) == read(flat)


def test_sections_of_positions_do_not_change_the_rotation_of_text() -> None:
    flat = replace(HEAD, flat=True).config()
    head = read(flat | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}})
    assert head.layer.rope == replace(read(flat).layer.rope, sections=(2, 3, 3))


def test_only_specforges_class_has_llamas_layers_under_another_type() -> None:
    flat = replace(HEAD, flat=True).config() | {"model_type": "phi3", "architectures": ["Eagle3LlamaForCausalLM"]}
    with pytest.raises(BadCheckpoint, match="layers of a head should be of llama or qwen3, they are of phi3"):
        read(flat)


def test_norm_output_of_specforge_is_the_norm_before_the_head() -> None:
    flat = replace(HEAD, flat=True).config()
    assert read(flat | {"norm_output": True, "fc_norm": True}) == read(flat | {"fc_norm": True})  # its EAGLE-3.1
    assert read(flat | {"norm_output": False}) == replace(read(flat), norm_before_head=False)


def test_norm_output_may_be_ignored_by_name() -> None:
    flat = replace(HEAD, flat=True).config() | {"architectures": ["Eagle3LlamaForCausalLM"]}
    assert read(flat | {"norm_output": True}, ignored=["norm_output"]) == read(flat)


def test_a_parallel_head_has_a_mask_token() -> None:
    masked = replace(HEAD, mask_token=49)
    assert read(masked.config(), parallel=True) == replace(read(HEAD.config()), mask_token=49)


def test_a_flat_parallel_head_is_that_of_speculators() -> None:
    head = replace(HEAD, mask_token=49, norm_before_residual=True)
    flat = replace(head, flat=True).config()
    assert read(flat, parallel=True) == read(head.config(), parallel=True)
    renamed = {"ptd_token_id": 49} | {name: value for name, value in flat.items() if name != "mask_token_id"}
    assert read(renamed | {"architectures": ["PeagleLlamaForCausalLM"]}, parallel=True) == read(flat, parallel=True)
    with pytest.raises(BadCheckpoint, match="mask_token_id should be an id, it is missing: SpecForge does not save it"):
        read({name: value for name, value in flat.items() if name != "mask_token_id"}, parallel=True)
    with pytest.raises(BadCheckpoint, match=r"one of LlamaForCausalLMEagle3.* for an EAGLE-3 head, it is \['PEagle"):
        read(flat)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(HEAD, mask_token=50).config(), "mask_token_id should be an id below vocab_size, 50, it is 50"),
        (replace(HEAD, mask_token=4).config() | {"mask_token_id": None}, "mask_token_id should be an id, it is None"),
        (HEAD.config(), "speculators_model_type is 'eagle3', which the exporter does not implement"),
        (
            replace(HEAD, flat=True).config(),
            "PeagleLlamaForCausalLM for a P-EAGLE head, it is ['LlamaForCausalLMEagle3']",
        ),
    ],
)
def test_configs_of_other_heads_are_rejected_for_parallel_drafts(config: dict[str, Any], message: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(config, parallel=True)
    assert message in str(caught.value)


@pytest.mark.parametrize("layers", [2, 3, 6])
def test_a_target_with_few_layers_needs_explicit_feature_layers(layers: int) -> None:
    config = HEAD.config() | {"eagle_aux_hidden_state_layer_ids": None}
    with pytest.raises(BadCheckpoint, match=f"must be given for a target of {layers} layers"):
        Eagle3Spec.from_hf(config, replace(TARGET, layers=layers, sliding_layers=(False,) * layers))


@pytest.mark.parametrize(("layers", "features"), [(6, (2, 3, 3)), (7, (2, 3, 4)), (8, (2, 4, 5)), (33, (2, 16, 30))])
def test_features_come_from_an_early_a_middle_and_a_late_layer_by_default(
    layers: int, features: tuple[int, ...]
) -> None:
    """As vLLM and SGLang take them: 2, layers // 2 and layers - 3."""
    config = HEAD.config() | {"eagle_aux_hidden_state_layer_ids": None}
    target = replace(TARGET, layers=layers, sliding_layers=(False,) * layers)
    if len({*features}) < 3:
        with pytest.raises(BadCheckpoint, match=re.escape(f"the default, {[*features]}")):
            Eagle3Spec.from_hf(config, target)
    else:
        assert Eagle3Spec.from_hf(config, target).features == features


def test_d2t_maps_draft_tokens_to_target_ids(tmp_path: Path) -> None:
    weights = HEAD.weights()
    ids = target_ids(Checkpoint.open(HEAD.save(tmp_path, weights)), read(HEAD.config()))
    assert ids is not None
    np.testing.assert_array_equal(np.flatnonzero(weights["t2d"]), ids)


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (None, "tensor 'd2t' is missing: a head of 20 tokens needs it"),
        (torch.full((20,), 40), "must be ids of the target, 0..49; d2t holds offsets, not ids; it gives 50"),
        (-torch.arange(20), "another id for every token of the draft; 0 comes twice"),
        (torch.zeros(20, dtype=torch.int64), "t2d must be true where i + d2t[i] points"),
        (torch.zeros(21, dtype=torch.int64), "tensor 'd2t' should be int64 or int32[20], it is int64[21]"),
    ],
)
def test_inconsistent_d2t_and_t2d_are_rejected(tmp_path: Path, d2t: torch.Tensor | None, message: str) -> None:
    weights = {name: each for name, each in HEAD.weights().items() if name != "d2t"} | (
        {} if d2t is None else {"d2t": d2t}
    )
    with pytest.raises(BadCheckpoint) as caught:
        target_ids(Checkpoint.open(HEAD.save(tmp_path, weights)), read(HEAD.config()))
    assert message in str(caught.value)
