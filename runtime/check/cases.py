"""Batches that mix what requests may ask of verification and drafting, awkward values included."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tandemrt.engines import operators
from tandemrt.engines.contract import mask_words
from tandemrt.plugins.reference import sample_draft, token_bitmask, verify_draft

Case = dict[str, np.ndarray]
SAMPLING = tuple(binding.name for binding in operators.SAMPLING)


def awkward_case(*, vocab: int, window: int, batch: int, seed: int, dtype: str, filters: bool = True) -> Case:
    """Rules, temperatures, filters, seeds and masks mixed; ragged drafts, dead rows, logits that are no numbers.

    The arrays are named as inputs of verification and drafting. Logits are float32 that ``dtype`` holds exactly. Most
    drafts are what the law itself would draw, so that runs of every length occur. ``filters`` False leaves what
    ``Engine.bind`` calls so out of every request: top-k, top-p, min-p and the rejection rule.
    """
    rng = np.random.default_rng([seed, vocab, window])
    rows = window + 1
    logits = 3 * rng.standard_normal((batch, rows, vocab), dtype=np.float32)
    for value, share in ((np.nan, 0.01), (np.inf, 0.01)):
        logits[rng.random(logits.shape, dtype=np.float32) < share] = value
    dead = rng.random((batch, rows)) < 0.04
    logits[dead] = np.nan
    logits = rounded(logits, dtype)
    bitmask = rng.integers(-(2**31), 2**31, (batch, rows, mask_words(vocab))).astype(np.int32)
    bitmask[rng.random(batch) < 0.4] = -1
    bitmask[rng.random((batch, rows)) < 0.04] = 0
    sampling = {
        "temperature": rng.choice(np.array([0, 0.6, 1.4], np.float32), batch),
        "top_k": rng.choice([0, 1, 7, vocab, 10**6], batch),
        "top_p": rng.choice(np.array([0, 0.4, 0.95, 1], np.float32), batch),
        "min_p": rng.choice(np.array([0, 0.02, 0.5], np.float32), batch),
        "seed": rng.integers(-(2**63), 2**63, batch),
        "position": rng.integers(0, 2**40, batch),
        "rule": rng.integers(0, 2, batch),
    }
    if not filters:
        sampling |= {name: np.zeros_like(sampling[name]) for name in ("top_k", "top_p", "min_p", "rule")}
    drafts = rng.integers(0, vocab, (batch, window))
    draft_probs = np.zeros((batch, window, vocab), np.float32)
    masked = token_bitmask(logits, bitmask)
    for at in range(window):
        token, law = sample_draft(masked[:, at], **{**sampling, "position": sampling["position"] + at})
        drawn = (rng.random(batch) < 0.8) & (token >= 0)
        drafts[drawn, at], draft_probs[drawn, at] = token[drawn], law[drawn]
    drafts[rng.random(drafts.shape) < 0.04] = vocab  # in no vocabulary: what a slot without a draft may hold
    return {
        "logits": logits,
        "bitmask": bitmask,
        "draft_tokens": drafts,
        "draft_len": rng.integers(0, window + 1, batch),
        "draft_probs": draft_probs,
        "target_ids": np.sort(rng.choice(4 * vocab, vocab, replace=False)).astype(np.int32),
        **sampling,
    }


def rounded(logits: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest numbers that ``dtype`` (a half precision or float32) holds, as float32."""
    import torch

    result: np.ndarray = torch.from_numpy(logits).to(getattr(torch, dtype)).float().numpy()
    return result


def verified(case: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and counts by definition; without ``draft_probs`` every draft counts as chosen."""
    given = {name: values for name, values in case.items() if name not in ("bitmask", "target_ids")}
    return verify_draft(**{**given, "logits": token_bitmask(case["logits"], case["bitmask"])})


def drawn(case: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Drafted token and its law, for the first row of logits, by definition."""
    asked = {name: case[name] for name in SAMPLING}
    return sample_draft(case["logits"][:, :1], **asked, target_ids=case.get("target_ids"))
