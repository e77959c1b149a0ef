"""Check engines that apply penalties and logit biases against the numpy reference, bit by bit."""

import ml_dtypes
import numpy as np
import torch

from tandemrt.engines.bundle.manifest import Limits
from tandemrt.engines.contract.calls import drafted
from tandemrt.engines.contract.contract import logits_width
from tandemrt.plugins.reference import adjust_logits
from tandemrt.runtime.check.cases import Case
from tandemrt.runtime.check.result import CheckResult, passed_if
from tandemrt.runtime.device.backends.base import Engine

_CASES = 6
_ELEMENTS = 4_000_000  # logits in one case


def check_adjust(name: str, engine: Engine, limits: Limits) -> CheckResult:
    """Check ``engine`` with and without draft tokens."""
    windows = drafted(limits.num_draft_tokens)
    vocab, wrong, total = logits_width(engine.contract), 0, 0
    batch = max(1, min(limits.batch, 24, _ELEMENTS // (vocab * (limits.num_draft_tokens + 1))))
    for seed in range(_CASES):
        window = windows[seed % len(windows)]
        case = edge_case_adjust_batch(
            vocab=vocab, window=window, columns=min(vocab, 64 << seed), batch=batch, seed=seed
        )
        logits, expected = run_adjust(engine, case), reference_adjust(case, engine.contract["logits"].dtype)
        differ = ~((logits == expected) | (np.isnan(logits) & np.isnan(expected)))
        wrong += int(differ.reshape(batch, -1).any(axis=1).sum())
        total += batch
    return CheckResult(
        name,
        "numpy reference, penalties and biases mixed",
        f"{total - wrong} of {total} requests equal in every logit",
        passed_if(wrong == 0),
        {"requests": total, "wrong": wrong, "vocab": vocab},
    )


def edge_case_adjust_batch(*, vocab: int, window: int, columns: int, batch: int, seed: int) -> Case:
    """Return a batch with penalty lists of all lengths, NaN and infinite logits, and drafts outside of the lists.

    The arrays have the names of the inputs of contract.adjust. Logits are float32.
    """
    rng = np.random.default_rng([seed, vocab, window, columns])
    logits = 3 * rng.standard_normal((batch, window + 1, vocab), dtype=np.float32)
    odd = rng.random(logits.shape, dtype=np.float32) < 0.02
    logits[odd] = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), int(odd.sum()))
    tokens = np.stack([rng.permutation(vocab)[:columns] for _ in range(batch)]).astype(np.int32)
    length = rng.integers(0, columns + 1, batch).astype(np.int32)
    length[:2] = (columns, 0)[:batch]
    place = (rng.random((batch, window)) * np.maximum(length, 1)[:, None]).astype(np.int64)
    draft = np.take_along_axis(tokens, place, axis=1).astype(np.int64)
    draft[rng.random(draft.shape) < 0.2] = -1
    return {
        "logits": logits,
        "draft_tokens": draft,
        "entry_tokens": tokens,
        "entry_counts": rng.choice(np.array([0, 0, 1, 2, 90], np.int32), (batch, columns)),
        "entry_in_prompt": rng.integers(0, 2, (batch, columns)).astype(np.int32),
        "entry_bias": rng.choice(np.array([0, 0, -100, 0.3, 100], np.float32), (batch, columns)),
        "entry_len": length,
        "presence": rng.choice(np.array([0, -2, 0.7, 2], np.float32), batch),
        "frequency": rng.choice(np.array([0, -0.1, 0.3, 2], np.float32), batch),
        "repetition": rng.choice(np.array([1, 0.8, 1.1, 1.3], np.float32), batch),
    }


def run_adjust(engine: Engine, case: Case) -> np.ndarray:
    """Run ``engine`` on ``case`` and return the logits, which it changes in place, as float32."""
    tensors = {
        b.name: torch.tensor(case[b.name], dtype=getattr(torch, b.dtype), device=engine.device)
        for b in engine.contract.inputs
    }
    engine.bind(tensors).run()
    logits: np.ndarray = tensors["logits"].float().cpu().numpy()
    return logits


def reference_adjust(case: Case, dtype: str) -> np.ndarray:
    """Return the logits by definition, as float32, for an engine with logits of ``dtype``."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return adjust_logits(**{**case, "logits": case["logits"].astype(kind)}).astype(np.float32)
