"""Random batches for verification and drafting that mix all sampling parameters and contain edge cases."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tandemrt.engines.contract.masks import mask_words
from tandemrt.engines.contract.sampling_parameters import FILTERS, SAMPLING_PARAMETERS
from tandemrt.plugins.reference import sample_draft, token_bitmask, verify_draft

Case = dict[str, np.ndarray]


def edge_case_batch(*, vocab: int, window: int, batch: int, seed: int, dtype: str, needs_probs: bool = True) -> Case:
    """Return a batch with mixed rules, temperatures, filters, seeds, masks and draft lengths.

    Edge cases: NaN and infinite logits, rows that are all NaN, masks that allow nothing, draft ids outside of the
    vocabulary. The arrays have the names of the inputs of verification and drafting. Logits are float32 values that
    ``dtype`` represents exactly. Most drafts are sampled from the draft distribution, so that accepted runs of every
    length occur. ``needs_probs`` False leaves filters and the rejection rule out of every request (see Engine.bind).
    """
    rng = np.random.default_rng([seed, vocab, window])
    rows = window + 1
    logits = 3 * rng.standard_normal((batch, rows, vocab), dtype=np.float32)
    for value, share in ((np.nan, 0.01), (np.inf, 0.01)):
        logits[rng.random(logits.shape, dtype=np.float32) < share] = value
    dead = rng.random((batch, rows)) < 0.04
    logits[dead] = np.nan
    logits = round_to(logits, dtype)
    bitmask = rng.integers(-(2**31), 2**31, (batch, rows, mask_words(vocab))).astype(np.int32)
    bitmask[rng.random(batch) < 0.4] = -1
    bitmask[rng.random((batch, rows)) < 0.04] = 0
    sampling = {
        "temperature": rng.choice(np.array([0, 0.6, 1.4], np.float32), batch),
        **{name: rng.choice(np.array(each.cases, each.dtype), batch) for name, each in FILTERS.items()},
        "seed": rng.integers(-(2**63), 2**63, batch),
        "position": rng.integers(0, 2**40, batch),
        "rule": rng.integers(0, 2, batch),
    }
    if not needs_probs:
        sampling |= {name: np.zeros_like(sampling[name]) for name in (*FILTERS, "rule")}
    drafts = rng.integers(0, vocab, (batch, window))
    draft_probs = np.zeros((batch, window, vocab), np.float32)
    masked = token_bitmask(logits, bitmask)
    for at in range(window):
        token, probs = sample_draft(masked[:, at], **{**sampling, "position": sampling["position"] + at})
        drawn = (rng.random(batch) < 0.8) & (token >= 0)
        drafts[drawn, at], draft_probs[drawn, at] = token[drawn], probs[drawn]
    drafts[rng.random(drafts.shape) < 0.04] = vocab  # outside of the vocabulary, as in a slot without a draft
    return {
        "logits": logits,
        "bitmask": bitmask,
        "draft_tokens": drafts,
        "draft_len": rng.integers(0, window + 1, batch),
        "draft_probs": draft_probs,
        "target_ids": np.sort(rng.choice(4 * vocab, vocab, replace=False)).astype(np.int32),
        **sampling,
    }


def round_to(logits: np.ndarray, dtype: str) -> np.ndarray:
    """Return ``logits`` rounded to ``dtype`` (a half precision or float32), as float32."""
    import torch

    result: np.ndarray = torch.from_numpy(logits).to(getattr(torch, dtype)).float().numpy()
    return result


def reference_verify(case: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and counts by definition. Without ``draft_probs`` every draft token has probability 1."""
    arguments = {name: values for name, values in case.items() if name not in ("bitmask", "target_ids")}
    return verify_draft(**{**arguments, "logits": token_bitmask(case["logits"], case["bitmask"])})


def reference_draft(case: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the draft token and its distribution by definition, for the first row of logits."""
    sampling = {name: case[name] for name in SAMPLING_PARAMETERS}
    return sample_draft(case["logits"][:, :1], **sampling, target_ids=case.get("target_ids"))
