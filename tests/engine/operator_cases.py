"""Batches that mix all features of the operators, for comparing their implementations."""

import numpy as np

from tandemrt.engines.contract.masks import mask_words
from tandemrt.engines.contract.sampling_parameters import FILTERS
from tandemrt.plugins.reference import sample_draft, token_bitmask, verify_draft

BATCH = 24


def case(vocab, window, batch=BATCH, seed=0):
    """A batch that mixes rules, temperatures, filters, seeds, ragged drafts, dead rows and odd values."""
    rng = np.random.default_rng([seed, vocab, window])
    logits = 3 * rng.normal(size=(batch, window + 1, vocab)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.02] = np.nan
    logits[rng.random(logits.shape) < 0.02] = np.inf
    logits[rng.random(logits.shape[:2]) < 0.03] = np.nan
    words = mask_words(vocab)
    bitmask = rng.integers(-(2**31), 2**31, (batch, window + 1, words)).astype(np.int32)
    bitmask[rng.random(batch) < 0.4] = -1
    bitmask[rng.random((batch, window + 1)) < 0.03] = 0
    request = {
        "temperature": rng.choice([0, 0.6, 1.4], batch).astype(np.float32),
        **{name: rng.choice(each.cases, batch).astype(each.dtype) for name, each in FILTERS.items()},
        "seed": rng.integers(-(2**63), 2**63, batch),
        "position": rng.integers(0, 2**40, batch),
        "rule": rng.integers(0, 2, batch),
    }
    probs = rng.dirichlet(np.full(vocab, 0.1), (batch, window)).astype(np.float32).reshape(batch, window, vocab)
    probs[rng.random((batch, window)) < 0.3] = 0
    masked = token_bitmask(logits, bitmask)
    draft = rng.integers(0, vocab, (batch, window))
    for i in range(window):  # mostly what coupling would draft, so that runs of every length occur
        drawn, probabilities = sample_draft(masked[:, i], **(request | {"position": request["position"] + i}))
        keep = rng.random(batch) < 0.8
        draft[keep, i], probs[keep, i] = drawn[keep], probabilities[keep]
    probs[rng.random((batch, window)) < 0.2] *= 3  # not a distribution, but defined: it leaves an empty residual
    impossible = rng.random((batch, window)) < 0.1
    chosen = np.where(impossible, 0, np.take_along_axis(probs, draft[..., None], axis=-1)[..., 0])
    # Drafts that their own distribution excludes.
    np.put_along_axis(probs, draft[..., None], chosen[..., None], axis=-1)
    odd = rng.random(draft.shape) < 0.05
    draft[odd] = rng.choice([-1, vocab, 2**40], odd.sum())
    length = rng.integers(0, window + 1, batch)
    window_of_drafts = {"draft_tokens": draft, "draft_len": length, "draft_probs": probs}
    return {"logits": logits, "bitmask": bitmask, **window_of_drafts, **request}


def restricted(tensors, known, seed=0):
    """Drafting with a vocabulary of ``known`` tokens, and the same over all tokens with the others masked."""
    vocab = tensors["logits"].shape[-1]
    ids = np.sort(np.random.default_rng(seed).choice(vocab, known, replace=False)).astype(np.int32)
    barred = np.full_like(tensors["logits"], -np.inf)
    barred[..., ids] = tensors["logits"][..., ids]
    return tensors | {"logits": tensors["logits"][..., ids], "target_ids": ids}, tensors | {"logits": barred}


def reference_verify(tensors):
    arguments = {name: values for name, values in tensors.items() if name != "bitmask"}
    return verify_draft(**(arguments | {"logits": token_bitmask(tensors["logits"], tensors["bitmask"])}))
