"""Reading configs of DSpark checkpoints, and errors before anything is built."""

from dataclasses import replace
from typing import Any

import pytest

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.dspark import DSparkSpec
from tests.dspark import DSparkHead
from tests.plain.test_eagle3_spec import TARGET

HEAD = DSparkHead(vocab=50, hidden=32, draft_vocab=50, block=7, mask_token=49, features=(2, 4, 5), max_length=64)


def read(config: dict[str, Any]) -> DSparkSpec:
    return DSparkSpec.from_hf(config, TARGET)


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_all_config_forms_give_the_same_spec(markov: str) -> None:
    head = replace(HEAD, markov=markov)
    flat, nested = (replace(head, flat=True, nested=nested) for nested in (False, True))
    assert read(head.config()) == read(flat.config()) == read(nested.config())
    assert read(head.config()).max_draft_tokens == 7
    assert read(head.config() | {"sample_from_anchor": None}) == read(head.config())  # true by default


def test_a_block_may_skip_sampling_from_its_anchor() -> None:
    assert read(HEAD.config() | {"sample_from_anchor": False}).max_draft_tokens == 6


def test_a_head_without_a_type_is_vanilla() -> None:
    config = HEAD.config()
    del config["markov_head_type"]
    assert read(config).markov_head_type == "vanilla"


def test_fields_of_confidence_heads_and_training_are_ignored() -> None:
    other = {"enable_confidence_head": False, "confidence_head_with_markov": False, "num_anchors": 3}
    assert read(HEAD.config() | other) == read(HEAD.config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": None}, "markov_rank should be an integer of at least 1"),
        ({"markov_rank": 0}, "markov_rank should be an integer of at least 1, it is 0"),
        ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm', which the exporter does not implement"),
        (
            {"markov_head_type": "rnn", "sample_from_anchor": False},
            "sample_from_anchor should be true for markov_head_type 'rnn', it is False",
        ),
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash', which the exporter does not"),
        ({"conv_kernel_size": 2}, "the field(s) 'conv_kernel_size'"),
        ({"block_size": 18}, "block_size should be 2 to 17, it is 18"),
    ],
)
def test_configs_that_do_not_fit_are_rejected(changes: Any, message: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(HEAD.config() | changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["DFlashDraftModel"]},
            "should be one of Qwen3DSparkModel or DSparkDraftModel for a block draft, it is",
        ),
        ({"dflash_config": 3}, "dflash_config should be an object, it is 3"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type is 'domino', which the exporter"),
        ({"dflash_config": {"dspark_backbone_conv_enabled": True}}, "dspark_backbone_conv_enabled is True"),
        ({"dflash_config": {"shift_label": True}}, "the field(s) 'shift_label'"),
        ({"target_layer_ids": [1, 7]}, "by their outputs, -1..6"),
    ],
)
def test_flat_configs_that_do_not_fit_are_rejected(changes: Any, message: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(replace(HEAD, flat=True).config() | changes)
    assert message in str(caught.value)
