"""Verification and drafting, whatever runs them, against their definitions in numpy."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.engines.binding import Binding
from tandemrt.engines.calls import drafted
from tandemrt.engines.contract import logits_width
from tandemrt.engines.manifest import Limits
from tandemrt.runtime.backends.base import Engine
from tandemrt.runtime.check.adjust import check_adjust
from tandemrt.runtime.check.cases import Case, awkward_case, drawn, verified
from tandemrt.runtime.check.finding import Finding, judged

Definition = Callable[[Mapping[str, Any]], tuple[np.ndarray, np.ndarray]]

_ELEMENTS = 12_000_000  # logits in one check: their definition takes about two seconds
_NUDGES = 6
_TIES = 0.05  # of the requests: more are no accident
_SENTINEL = -99


def check_operators(engines: Mapping[str, Engine], limits: Limits) -> Iterator[Finding]:
    """Check every engine of ``engines`` without weights; verifying and drafting with and without filters."""
    for name, engine in engines.items():
        inputs = {binding.name for binding in engine.contract.inputs}
        if "entry_len" in inputs:
            yield check_adjust(name, engine, limits)
        elif "draft_tokens" in inputs:
            for window in drafted(limits.window):
                yield _check(f"{name}, window {window}", engine, limits, window, verified)
            yield _check(f"{name}, no filters", engine, limits, limits.window, verified, filters=False)
        elif "seed" in inputs:
            yield _check(name, engine, limits, 0, drawn)
            yield _check(f"{name}, no filters", engine, limits, 0, drawn, filters=False)


def _check(
    name: str, engine: Engine, limits: Limits, window: int, definition: Definition, *, filters: bool = True
) -> Finding:
    vocab, dtype = logits_width(engine.contract), engine.contract["logits"].dtype
    inputs, outputs = ([binding.name for binding in b] for b in (engine.contract.inputs, engine.contract.outputs))
    affordable = max(1, _ELEMENTS // (vocab * (window + 1)))
    batch = min(limits.batch, 24, affordable)
    total = batch * max(1, min(96, affordable) // batch)
    ties, wrong, apart = 0, 0, 0.0
    for seed in range(total // batch):
        whole = awkward_case(vocab=vocab, window=window, batch=batch, seed=seed, dtype=dtype, filters=filters)
        case = {key: whole[key] for key in inputs}
        found, expected = run(engine, case, filters=filters), definition(case)
        mine = found[outputs[0]]
        differ = (mine != expected[0]).reshape(batch, -1).any(axis=1)
        for row in np.flatnonzero(differ):
            alone = {key: values if key == "target_ids" else values[[row]] for key, values in case.items()}
            tie = is_tie(alone, mine[row], definition)
            ties, wrong = ties + tie, wrong + (not tie)
        if "count" in found:
            wrong += int((found["count"] != (mine >= 0).sum(axis=1)).sum())
        if "draft_probs" in found:
            apart = max(apart, float(np.abs(found["draft_probs"] - expected[1])[~differ].max(initial=0)))
    draft_probs = f"; draft probabilities at most {apart:.1g} apart" if "draft_probs" in outputs else ""
    return Finding(
        name,
        f"numpy reference, {'rules, filters and' if filters else 'coupled rule,'} masks mixed",
        f"{total - wrong - ties} of {total} requests equal, {ties} tied at float rounding, {wrong} wrong{draft_probs}",
        judged(wrong == 0 and ties <= _TIES * total and apart < 1e-5),
        {"requests": total, "ties": ties, "wrong": wrong, "vocab": vocab, "draft_probs_error": apart},
    )


def run(engine: Engine, case: Case, *, filters: bool) -> dict[str, np.ndarray]:
    """Outputs of ``engine`` on ``case``; they hold a sentinel before, so what is not written shows."""
    rows = case["logits"].shape
    sizes = {"batch": rows[0], "window": rows[1] - 1, "window+1": rows[1]}

    def tensor(binding: Binding) -> torch.Tensor:
        values = torch.from_numpy(np.ascontiguousarray(case[binding.name]))
        return values.to(getattr(torch, binding.dtype)).to(engine.device)

    made = {
        b.name: torch.full(b.resolve(sizes), _SENTINEL, dtype=getattr(torch, b.dtype), device=engine.device)
        for b in engine.contract.outputs
    }
    engine.bind({b.name: tensor(b) for b in engine.contract.inputs} | made, filters=filters).run()
    return {name: values.cpu().numpy() for name, values in made.items()}


def is_tie(case: Case, found: np.ndarray, definition: Definition) -> bool:
    """Whether the definition gives ``found`` once what it reads is moved by about the rounding of a float32."""
    rng = np.random.default_rng(0)
    for _ in range(_NUDGES):
        nudge = 1 + 2e-6 * rng.uniform(-1, 1, case["logits"].shape).astype(np.float32)
        moved = {**case, "logits": case["logits"] * nudge}
        for name in ("top_p", "min_p"):
            moved[name] = np.minimum(case[name] * np.float32(1 + 2e-6 * rng.uniform(-1, 1)), np.float32(1))
        if np.array_equal(definition(moved)[0][0], found):
            return True
    return False
