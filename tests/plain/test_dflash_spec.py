"""Reading configs of DFlash checkpoints, and errors before anything is built."""

from dataclasses import replace
from typing import Any

import pytest

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.dflash import DFlashSpec
from tests.dflash import BlockHead
from tests.plain.test_eagle3_spec import TARGET

HEAD = BlockHead(vocab=50, hidden=32, draft_vocab=50, block=8, mask_token=49, features=(2, 4, 5), max_length=64)


def read(config: dict[str, Any], **layer: Any) -> DFlashSpec:
    if layer:
        config = config | {"transformer_layer_config": config["transformer_layer_config"] | layer}
    return DFlashSpec.from_hf(config, TARGET)


def test_both_config_forms_give_the_same_spec() -> None:
    """speculators lists layers by their inputs, the flat form by their outputs."""
    flat = replace(HEAD, flat=True).config()
    assert flat["dflash_config"]["target_layer_ids"] == [1, 3, 4]
    newer = {name: value for name, value in flat.items() if name != "block_size"}
    newer["dflash_config"] = flat["dflash_config"] | {"block_size": 8}
    assert read(flat) == read(newer) == read(HEAD.config())
    assert read(HEAD.config()).features == (2, 4, 5)


def test_the_form_of_angelslim_is_z_labs_with_options_of_its_training() -> None:
    flat = replace(HEAD, flat=True).config()
    training = {"num_anchors": 512, "loss_decay_gamma": 7.0, "attention_backend": "flex_attention"}
    assert read(flat | training | {"architectures": ["QwenDFlashDraftModel"], "tie_word_embeddings": True}) == read(
        flat
    )


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40}


@pytest.mark.parametrize(
    ("changes", "more", "causal", "window"),
    [
        (MIXED, {}, (True, False), 40),
        (MIXED, {"causal": False}, (False, False), 40),
        (MIXED | {"is_causal": True}, {}, (True, True), 40),
        ({}, {"use_swa": True, "swa_window_size": 30}, (False, False), 30),
        ({"sliding_window": 40}, {"use_swa": True, "swa_window_size": 30}, (False, False), 30),
        ({"sliding_window": 40}, {"use_swa": True}, (False, False), 40),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 40}, {"use_swa": True}, (False, False), 40),
        ({"use_sliding_window": False, "sliding_window": None}, {}, (False, False), None),
    ],
)
def test_sliding_layers_of_the_flat_form_are_read_as_vllm_reads_them(
    changes: Any, more: Any, causal: tuple[bool, ...], window: int | None
) -> None:
    flat = replace(HEAD, flat=True).config()
    spec = read(flat | changes | {"dflash_config": flat["dflash_config"] | more})
    assert (spec.causal, spec.max_context) == (causal, window)


def test_sampling_from_the_anchor_drafts_one_more_token() -> None:
    assert read(HEAD.config()).max_draft_tokens == 7
    assert read(HEAD.config() | {"sample_from_anchor": True}).max_draft_tokens == 8


@pytest.mark.parametrize("size", [2, 17])
def test_the_smallest_and_the_largest_block_are_read(size: int) -> None:
    assert read(HEAD.config() | {"block_size": size}).max_draft_tokens == size - 1


def test_sliding_layers_are_causal_by_default() -> None:
    slides = replace(HEAD, sliding=(True, False)).config()
    assert (read(slides).causal, read(slides).max_context) == ((True, False), 64)
    assert read(slides | {"sliding_window_non_causal": True}).causal == (False, False)


@pytest.mark.parametrize(
    ("changes", "layer", "message"),
    [
        ({}, {"vocab_size": 60}, "vocab_size should be the target's, 50, it is 60; choose a head"),
        ({"target_hidden_size": 64}, {}, "target_hidden_size should be the target's hidden_size, 32, it is 64"),
        ({"draft_vocab_size": 51}, {}, "draft_vocab_size should be at most the target's vocab_size, 50, it is 51"),
        ({}, {"hidden_size": 64}, "hidden_size should be the target's, 32, whose embedding it reads, it is 64"),
        ({"aux_hidden_state_layer_ids": [2, 8]}, {}, "different layers of the target by their inputs, 0..7"),
        ({"aux_hidden_state_layer_ids": None}, {}, "aux_hidden_state_layer_ids is missing"),
        ({"block_size": 18}, {}, "block_size should be 2 to 17, it is 18"),
        ({"block_size": 1}, {}, "block_size should be 2 to 17, it is 1"),
        ({"mask_token_id": 50}, {}, "mask_token_id should be an id below vocab_size, 50, it is 50"),
        ({"mask_token_id": None}, {}, "mask_token_id should be an id, it is None"),
        ({"sample_from_anchor": 1}, {}, "sample_from_anchor should be true or false, it is 1"),
        ({"speculators_model_type": "dspark"}, {}, "speculators_model_type is 'dspark', which the exporter does not"),
        ({"markov_rank": 256}, {}, "the field(s) 'markov_rank'"),
    ],
)
def test_configs_that_do_not_fit_are_rejected(changes: Any, layer: Any, message: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(HEAD.config() | changes, **layer)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["DSparkDraftModel"]},
            "architectures should be one of DFlashDraftModel or QwenDFlashDraftModel for a block draft, it is",
        ),
        ({"architectures": ["DominoDraftModel"]}, "DominoDraftModel is not read: its head has a recurrent net"),
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel is not read: its layers are those of Gemma 4"),
        ({"num_target_layers": 9}, "num_target_layers should be the target's num_hidden_layers, 8, it is 9"),
        (
            {"use_sliding_window": True, "sliding_window": 40},
            "use_sliding_window without layer_types does not say which layers of a block draft slide",
        ),
        ({"is_causal": True, "dflash_config": {"causal": False}}, "causal and is_causal should be equal"),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 7]}},
            "by their outputs, -1..6 (tools disagree on 7, the last layer's output), it is [1, 7]",
        ),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1], "attention_sink_bias": True}},
            "'attention_sink_bias'",
        ),
        ({"block_size": None}, "block_size should be an integer of at least 1"),
        ({"use_swa": True, "layer_types": 5}, "layer_types should be a list, it is 5"),
        ({"use_swa": True, "layer_types": {"0": "full_attention"}}, "layer_types should be a list, it is {"),
    ],
)
def test_flat_configs_that_do_not_fit_are_rejected(changes: Any, message: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(replace(HEAD, flat=True).config() | changes)
    assert message in str(caught.value)
