"""Reading configs of DFlash2 checkpoints, and errors before anything is built."""

from dataclasses import replace
from typing import Any

import pytest

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.dflash2 import DFlash2Spec
from tests.dflash2 import DFlash2Head
from tests.plain.test_eagle3_spec import TARGET

HEAD = DFlash2Head(vocab=50, hidden=32, draft_vocab=50, block=8, mask_token=49, features=(2, 4, 5), max_length=64)


def read(config: dict[str, Any]) -> DFlash2Spec:
    return DFlash2Spec.from_hf(config, TARGET)


def test_both_config_forms_give_the_same_spec() -> None:
    flat = replace(HEAD, flat=True).config()
    assert read(flat) == read(HEAD.config())
    own = flat["dflash_config"]
    assert read(flat | own | {"dflash_config": {}}) == read(flat)
    assert read(flat | {"dflash_config": own | {"output_multiplier": 1.0}}) == read(flat)
    spec = read(flat)
    assert (spec.taps, spec.group, spec.rank, spec.candidates, spec.max_draft_tokens) == (2, 8, 6, 4, 7)


def test_sliding_layers_see_the_whole_block_unless_the_config_says_otherwise() -> None:
    slides = replace(HEAD, sliding=(True, False)).config()
    assert read(slides).causal == (True, False)
    del slides["sliding_window_non_causal"]
    assert read(slides).causal == (False, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernel_size": None}, "conv_kernel_size should be an integer of at least 1"),
        ({"conv_kernel_size": 9}, "conv_kernel_size should be at most block_size, 8, it is 9"),
        ({"conv_group_size": 5}, "conv_group_size should be a divisor of hidden_size, 32, it is 5"),
        ({"selector_top_k": 51}, "selector_top_k should be at most vocab_size, 50, it is 51"),
        ({"selector_rank": 0}, "selector_rank should be an integer of at least 1"),
        ({"draft_vocab_size": 40}, "draft_vocab_size should be the target's vocab_size, 50, it is 40"),
        ({"sample_from_anchor": True}, "sample_from_anchor should be false, it is True"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash', which the exporter does not"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale is 2.0, which the exporter does not implement"),
        ({"markov_rank": 8}, "the field(s) 'markov_rank'"),
    ],
)
def test_configs_that_do_not_fit_are_rejected(changes: Any, message: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(HEAD.config() | changes)
    assert message in str(caught.value)
