"""What a contract says of sizes, and where another one departs from it."""

from dataclasses import replace

import pytest

from tandemrt.engines import contract
from tandemrt.engines.contract import Binding

VERIFY = contract.verify(vocab=100, dtype="float32", draft_probs=False)


@pytest.mark.parametrize(("vocab", "words"), [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3), (128_256, 4008)])
def test_a_mask_row_has_the_words_that_its_vocabulary_fills_and_no_more(vocab: int, words: int) -> None:
    assert contract.mask_words(vocab) == words


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (63, 1), (64, 1), (65, 2), (128, 2)])
def test_a_row_has_the_blocks_that_its_tokens_fill_and_no_more(tokens: int, blocks: int) -> None:
    assert contract.blocks_of(tokens) == blocks


def test_calls_over_a_paged_cache_are_packed_and_those_over_a_linear_one_are_rectangles() -> None:
    sizes = {"layers": 1, "kv_heads": 2, "head_dim": 32, "capacity": 130, "vocab": 9, "dtype": "float16"}
    linear, paged = (contract.decoder(**sizes, cache=kind) for kind in ("linear", "paged"))  # type: ignore[arg-type]
    assert linear["token_ids"].shape == ("batch", "query")
    assert paged["token_ids"].shape == ("tokens",)
    assert paged["block_table"].shape == ("batch", 4)  # 3 would do for 130 tokens
    assert paged["prompt_table"].shape == ("prompts", 4)
    places = {binding.name for binding in contract.packed(4)}
    assert {binding.name for binding in paged.inputs} - {binding.name for binding in linear.inputs} == places
    for name in ("write_index", "score_rows", "logits"):
        assert linear[name] == paged[name]


def test_a_contract_departs_from_itself_nowhere_however_its_symbols_are_called() -> None:
    renamed = replace(VERIFY, outputs=tuple(replace(b, shape=tuple("?" for _ in b.shape)) for b in VERIFY.outputs))
    turned = replace(VERIFY, inputs=tuple(reversed(VERIFY.inputs)))
    assert VERIFY.differences(VERIFY) == VERIFY.differences(renamed) == VERIFY.differences(turned) == []


@pytest.mark.parametrize("kind", ["input", "output"])
def test_every_binding_that_departs_is_named(kind: str) -> None:
    bindings = getattr(VERIFY, f"{kind}s")
    stranger, first = Binding("stranger", "int64", ("batch",)), bindings[0]

    def departing(*changed: Binding) -> list[str]:
        return VERIFY.differences(replace(VERIFY, **{f"{kind}s": (*changed, *bindings[1:])}))

    assert departing() == [f"{kind} {first} is missing"]
    assert departing(first, stranger) == [f"{kind} stranger int64[batch] is not in the contract"]
    for other in (replace(first, dtype="int8"), replace(first, shape=(*first.shape, 1))):
        assert departing(other) == [f"{kind} {other} should be {first}"]


def test_a_size_that_an_engine_fixes_must_be_that_of_the_contract() -> None:
    other = contract.verify(vocab=96, dtype="float32", draft_probs=False)
    assert [line.split()[1] for line in VERIFY.differences(other)] == ["logits", "bitmask"]
