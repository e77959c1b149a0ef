"""Check verification and drafting engines against the numpy reference."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.engines.bundle.manifest import Limits
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.calls import drafted
from tandemrt.engines.contract.contract import logits_width
from tandemrt.engines.contract.sampling_parameters import FILTERS
from tandemrt.runtime.check.adjust_logits import check_adjust
from tandemrt.runtime.check.cases import Case, edge_case_batch, reference_draft, reference_verify
from tandemrt.runtime.check.result import CheckResult, passed_if
from tandemrt.runtime.device.backends.base import Engine

Definition = Callable[[Mapping[str, Any]], tuple[np.ndarray, np.ndarray]]

_ELEMENTS = 12_000_000  # logits in one check; the definition takes about two seconds for them
_NUDGES = 6
_TIES = 0.05  # largest share of requests that may be ties
_SENTINEL = -99


def check_operators(engines: Mapping[str, Engine], limits: Limits) -> Iterator[CheckResult]:
    """Check every engine without weights. Verification and drafting are checked with and without filters."""
    for name, engine in engines.items():
        inputs = {binding.name for binding in engine.contract.inputs}
        if "entry_len" in inputs:
            yield check_adjust(name, engine, limits)
        elif "draft_tokens" in inputs:
            for window in drafted(limits.num_draft_tokens):
                yield _check(f"{name}, window {window}", engine, limits, window, reference_verify)
            yield _check(
                f"{name}, no filters", engine, limits, limits.num_draft_tokens, reference_verify, needs_probs=False
            )
        elif "seed" in inputs:
            yield _check(name, engine, limits, 0, reference_draft)
            yield _check(f"{name}, no filters", engine, limits, 0, reference_draft, needs_probs=False)


def _check(
    name: str, engine: Engine, limits: Limits, window: int, definition: Definition, *, needs_probs: bool = True
) -> CheckResult:
    vocab, dtype = logits_width(engine.contract), engine.contract["logits"].dtype
    inputs, outputs = ([binding.name for binding in b] for b in (engine.contract.inputs, engine.contract.outputs))
    affordable = max(1, _ELEMENTS // (vocab * (window + 1)))
    batch = min(limits.batch, 24, affordable)
    total = batch * max(1, min(96, affordable) // batch)
    ties, wrong, apart = 0, 0, 0.0
    for seed in range(total // batch):
        batch_case = edge_case_batch(
            vocab=vocab, window=window, batch=batch, seed=seed, dtype=dtype, needs_probs=needs_probs
        )
        case = {key: batch_case[key] for key in inputs}
        results, expected = run_engine(engine, case, needs_probs=needs_probs), definition(case)
        tokens = results[outputs[0]]
        differ = (tokens != expected[0]).reshape(batch, -1).any(axis=1)
        for row in np.flatnonzero(differ):
            alone = {key: values if key == "target_ids" else values[[row]] for key, values in case.items()}
            tie = is_tie(alone, tokens[row], definition)
            ties, wrong = ties + tie, wrong + (not tie)
        if "count" in results:
            wrong += int((results["count"] != (tokens >= 0).sum(axis=1)).sum())
        if "draft_probs" in results:
            apart = max(apart, float(np.abs(results["draft_probs"] - expected[1])[~differ].max(initial=0)))
    draft_probs = f"; draft probabilities at most {apart:.1g} apart" if "draft_probs" in outputs else ""
    return CheckResult(
        name,
        f"numpy reference, {'rules, filters and' if needs_probs else 'coupled rule,'} masks mixed",
        f"{total - wrong - ties} of {total} requests equal, {ties} tied at float rounding, {wrong} wrong{draft_probs}",
        passed_if(wrong == 0 and ties <= _TIES * total and apart < 1e-5),
        {"requests": total, "ties": ties, "wrong": wrong, "vocab": vocab, "draft_probs_error": apart},
    )


def run_engine(engine: Engine, case: Case, *, needs_probs: bool) -> dict[str, np.ndarray]:
    """Return the outputs of ``engine`` on ``case``. Elements that it does not write keep a sentinel value."""
    rows = case["logits"].shape
    sizes = {"batch": rows[0], "window": rows[1] - 1, "window+1": rows[1]}

    def tensor(binding: Binding) -> torch.Tensor:
        values = torch.from_numpy(np.ascontiguousarray(case[binding.name]))
        return values.to(getattr(torch, binding.dtype)).to(engine.device)

    out_tensors = {
        b.name: torch.full(b.resolve(sizes), _SENTINEL, dtype=getattr(torch, b.dtype), device=engine.device)
        for b in engine.contract.outputs
    }
    engine.bind({b.name: tensor(b) for b in engine.contract.inputs} | out_tensors, needs_probs=needs_probs).run()
    return {name: values.cpu().numpy() for name, values in out_tensors.items()}


def is_tie(case: Case, tokens: np.ndarray, definition: Definition) -> bool:
    """Return whether the definition gives ``tokens`` after its inputs change by about float32 rounding."""
    rng = np.random.default_rng(0)
    for _ in range(_NUDGES):
        nudge = 1 + 2e-6 * rng.uniform(-1, 1, case["logits"].shape).astype(np.float32)
        moved = {**case, "logits": case["logits"] * nudge}
        for name, parameter in FILTERS.items():
            if parameter.dtype == "float32":
                factor = np.float32(1 + 2e-6 * rng.uniform(-1, 1))
                moved[name] = np.minimum(case[name] * factor, np.float32(parameter.most))
        if np.array_equal(definition(moved)[0][0], tokens):
            return True
    return False
