"""Sizes in a contract, and its differences from another contract."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.calls import drafted
from tandemrt.engines.contract.contract import Binding, Contract, RecurrentState
from tandemrt.engines.contract.dtypes import BYTES
from tandemrt.engines.contract.masks import mask_words

VERIFY = contract.verify(vocab=100, dtype="float32", draft_probs=False)


@pytest.mark.parametrize(("vocab", "words"), [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3), (128_256, 4008)])
def test_a_mask_row_has_the_fewest_words_with_a_bit_per_token(vocab: int, words: int) -> None:
    assert mask_words(vocab) == words


def test_rounds_without_drafts_and_with_a_full_window_need_calls_of_their_own() -> None:
    assert [drafted(window) for window in (0, 1, 4)] == [(0,), (0, 1), (0, 4)]


def test_every_dtype_has_the_size_that_torch_gives_it() -> None:
    assert {name: getattr(torch, name).itemsize for name in BYTES} == BYTES


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (63, 1), (64, 1), (65, 2), (128, 2)])
def test_a_row_has_as_many_blocks_as_its_tokens_need(tokens: int, blocks: int) -> None:
    assert contract.blocks_of(tokens) == blocks


def test_calls_over_a_paged_cache_are_packed_and_those_over_a_linear_one_are_rectangles() -> None:
    sizes = {"layers": 1, "kv_heads": 2, "head_dim": 32, "capacity": 130, "vocab": 9, "dtype": "float16"}
    linear, paged = (contract.decoder(**sizes, cache=kind) for kind in ("linear", "paged"))  # type: ignore[arg-type]
    assert linear["token_ids"].shape == ("batch", "query")
    assert paged["token_ids"].shape == ("tokens",)
    assert paged["block_table"].shape == ("batch", 4)  # even; 130 tokens need 3
    assert paged["prompt_table"].shape == ("prompts", 4)
    places = {binding.name for binding in contract.packed(4)}
    assert {binding.name for binding in paged.inputs} - {binding.name for binding in linear.inputs} == places
    for name in ("write_index", "score_rows", "logits"):
        assert linear[name] == paged[name]


SIZES: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 32, "capacity": 130, "vocab": 9, "dtype": "float16"}
HEAD, OPERATOR = {**SIZES, "hidden": 7}, {"vocab": 40, "dtype": "float16"}
MAMBA = {1: RecurrentState((3, 5), 6)}

# function, its other arguments, an option: the bindings that it adds and removes
OPTIONS: list[tuple[Callable[..., Contract], dict[str, Any], dict[str, Any], str]] = [
    (contract.decoder, SIZES, {"position_rows": 3}, "+input positions int64[3, batch, query]"),
    (contract.decoder, {**SIZES, "cache": "paged"}, {"position_rows": 3}, "+input positions int64[3, tokens]"),
    (contract.decoder, SIZES, {"features": 5}, "+output features float16[batch, query, 5]"),
    (
        contract.decoder,
        SIZES,
        {"image_width": 5},
        "+input image_rows int64[batch, query] +input image_states float16[image_tokens, 5]",
    ),
    (
        contract.decoder,
        SIZES,
        {"latent": True},
        " ".join(
            f"-{side}_value.{layer} float16[batch, 2, 130, 32]"
            for side in ("input past", "output present")
            for layer in (0, 1)
        ),
    ),
    (
        contract.decoder,
        {**SIZES, "latent": True},
        {"heads": {1: (4, 8)}, "kv_dtype": "float32"},
        " ".join(
            f"-{side}_key.{layer} float16[batch, 2, 130, 32] +{side}_key.{layer} float32[batch, {shape}]"
            for side in ("input past", "output present")
            for layer, shape in ((0, "2, 130, 32"), (1, "4, 130, 8"))
        ),
    ),
    (
        contract.decoder,
        {**SIZES, "latent": True, "history": 4},
        {"recurrent": MAMBA},
        "+input state_index int64[batch] +input commit_index int64[batch] "
        + " ".join(
            f"-{side}_key.1 float16[batch, 2, 130, 32] +{side}_state.1 float32[batch, 3, 5] "
            f"+{side}_recent.1 float16[batch, 4, 6]"
            for side in ("input past", "output present")
        ),
    ),
    (
        contract.decoder,
        {**SIZES, "latent": True, "history": 4, "cache": "paged", "heads": {1: (2, 32)}},
        {"recurrent": MAMBA},
        "+input state_index int64[batch] +input commit_index int64[batch] "
        "+input prompt_slots int64[prompts] +input prompt_state_index int64[prompts] "
        + " ".join(
            f"+{side}_state.1 float32[slots, 3, 5] +{side}_recent.1 float16[slots, 4, 6]"
            for side in ("input past", "output present")
        ),
    ),
    (contract.draft_head, HEAD, {"parallel": True}, "-output next_states float16[batch, rows, 7]"),
    (
        contract.draft_head,
        HEAD,
        {"further": True},
        "-output next_states float16[batch, rows, 7] +output next_states float16[batch, query, 7]",
    ),
    (contract.block, SIZES, {"row_states": 7}, "+output row_states float16[batch, rows, 7]"),
    (contract.markov, OPERATOR, {"row_states": 7}, "+input row_states float16[batch, 1, 7]"),
    (
        contract.markov,
        OPERATOR,
        {"memory": 7},
        "+input memory float16[batch, 7] +output next_memory float16[batch, 7]",
    ),
    (contract.propose, {**OPERATOR, "draft_probs": True}, {"target_ids": True}, "+input target_ids int32[40]"),
    (contract.propose, {**OPERATOR}, {"draft_probs": True}, "+output draft_probs float32[batch, 40]"),
    (contract.verify, {**OPERATOR}, {"draft_probs": True}, "+input draft_probs float32[batch, window, 40]"),
]


def lines_of(engine: Contract) -> set[str]:
    return {
        f"{side} {b}" for side, bindings in (("input", engine.inputs), ("output", engine.outputs)) for b in bindings
    }


@pytest.mark.parametrize(("function", "others", "option", "changes"), OPTIONS)
def test_an_option_changes_these_bindings_and_no_others(
    function: Callable[..., Contract], others: dict[str, Any], option: dict[str, Any], changes: str
) -> None:
    off = {"draft_probs": False} if "draft_probs" in option else {}
    without, changed = lines_of(function(**others, **off)), lines_of(function(**{**others, **option}))
    assert {f"-{b}" for b in without - changed} | {f"+{b}" for b in changed - without} == {
        f"{sign}{kind} {b}" for sign, kind, b in re.findall(r"([+-])(input|output) (\S+ \w+\[[^]]*\])", changes)
    }


def test_renamed_symbols_are_not_differences() -> None:
    renamed = replace(VERIFY, outputs=tuple(replace(b, shape=tuple("?" for _ in b.shape)) for b in VERIFY.outputs))
    turned = replace(VERIFY, inputs=tuple(reversed(VERIFY.inputs)))
    assert VERIFY.differences(VERIFY) == VERIFY.differences(renamed) == VERIFY.differences(turned) == []


@pytest.mark.parametrize("kind", ["input", "output"])
def test_every_differing_binding_is_reported(kind: str) -> None:
    bindings = getattr(VERIFY, f"{kind}s")
    unknown, first = Binding("unknown", "int64", ("batch",)), bindings[0]

    def departing(*changed: Binding) -> list[str]:
        return VERIFY.differences(replace(VERIFY, **{f"{kind}s": (*changed, *bindings[1:])}))

    assert departing() == [f"{kind} {first} is missing"]
    assert departing(first, unknown) == [f"{kind} unknown int64[batch] is not in the contract"]
    for other in (replace(first, dtype="int8"), replace(first, shape=(*first.shape, 1))):
        assert departing(other) == [f"{kind} {other} should be {first}"]


def test_a_size_that_an_engine_fixes_must_be_that_of_the_contract() -> None:
    other = contract.verify(vocab=96, dtype="float32", draft_probs=False)
    assert [line.split()[1] for line in VERIFY.differences(other)] == ["logits", "bitmask"]
