"""Sizes in a contract, and its differences from another contract."""

from dataclasses import replace

import pytest
import torch

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.calls import drafted
from tandemrt.engines.contract.contract import Binding
from tandemrt.engines.contract.dtypes import BYTES

VERIFY = contract.verify(vocab=100, dtype="float32", draft_probs=False)


@pytest.mark.parametrize(("vocab", "words"), [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3), (128_256, 4008)])
def test_a_mask_row_has_the_fewest_words_with_a_bit_per_token(vocab: int, words: int) -> None:
    assert contract.mask_words(vocab) == words


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
