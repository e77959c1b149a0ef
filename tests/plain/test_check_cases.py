"""The random batches that ``check`` gives to engines contain the edge cases that they name."""

import numpy as np

from tandemrt.engines.contract.sampling_parameters import FILTERS
from tandemrt.runtime.check.adjust_logits import edge_case_adjust_batch
from tandemrt.runtime.check.cases import edge_case_batch, reference_verify

VOCAB, WINDOW, COLUMNS, BATCH = 64, 5, 7, 256


def test_batches_for_verification_mix_all_edge_cases() -> None:
    case = edge_case_batch(vocab=VOCAB, window=WINDOW, batch=BATCH, seed=0, dtype="float32")
    logits, bitmask = case["logits"], case["bitmask"]
    assert all(kind(logits).any() for kind in (np.isnan, np.isposinf, np.isfinite))
    assert {0, VOCAB} < {*np.isnan(logits).sum(axis=-1).flat}, "whole rows, and none of a row"
    assert (bitmask == 0).all(axis=-1).any()
    assert 0.3 < (bitmask == -1).all(axis=(1, 2)).mean() < 0.5
    assert {*case["draft_tokens"].flat} == {*range(VOCAB + 1)}, "one is outside of the vocabulary"
    assert {*case["draft_len"]} == {*range(WINDOW + 1)}
    assert ({*case["rule"]}, len({*case["temperature"]}), len({*case["seed"]})) == ({0, 1}, 3, BATCH)
    for name, parameter in FILTERS.items():
        assert {*case[name]} == {*np.array(parameter.cases, parameter.dtype)}
    lengths = [int((tokens >= 0).sum()) for tokens in reference_verify(case)[0]]
    assert {*range(1, WINDOW + 2)} <= {*lengths}, "runs of every length are accepted"


def test_batches_without_probabilities_have_neither_filters_nor_the_rejection_rule() -> None:
    case = edge_case_batch(vocab=VOCAB, window=WINDOW, batch=BATCH, seed=0, dtype="float32", needs_probs=False)
    assert not any(case[name].any() for name in (*FILTERS, "rule"))


def test_batches_of_penalties_mix_all_edge_cases() -> None:
    case = edge_case_adjust_batch(vocab=VOCAB, window=WINDOW, columns=COLUMNS, batch=BATCH, seed=0)
    assert all(kind(case["logits"]).any() for kind in (np.isnan, np.isposinf, np.isneginf, np.isfinite))
    assert {*case["entry_len"]} == {*range(COLUMNS + 1)}
    assert {COLUMNS, 0} == {*case["entry_len"][:2]}
    assert {*case["draft_tokens"].flat} == {*range(-1, VOCAB)}
    values = {name: len({*case[name].flat}) for name in ("entry_counts", "entry_in_prompt", "entry_bias")}
    assert values == {"entry_counts": 4, "entry_in_prompt": 2, "entry_bias": 4}
    assert all(len({*case[name]}) == 4 for name in ("presence", "frequency", "repetition"))
