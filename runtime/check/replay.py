"""Engines replayed as CUDA graphs against the same engines run directly, on inputs that change between replays."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.engines.manifest import Limits
from tandemrt.runtime.backends.base import Engine
from tandemrt.runtime.caches.kv_cache import windows
from tandemrt.runtime.check.adjust import adjust_case
from tandemrt.runtime.check.cases import awkward_case
from tandemrt.runtime.check.finding import Finding, judged
from tandemrt.runtime.check.walk import Plan, is_decoder, make_rows, with_states
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.round.graphs import Graphs, same_bits

_TIMES = 3  # the first makes the graph, the others replay it
Inputs = dict[str, torch.Tensor]


def check_replay(name: str, engine: Engine, limits: Limits, plan: Plan) -> Finding:
    """Run ``engine`` through a graph and directly; outputs must be the same bits."""
    check, against = f"graph replay of {name}", "the same engine run directly"
    if engine.device.type != "cuda":
        return Finding(check, against, "a CPU has no CUDA graphs", "not applicable")
    if not engine.capturable:
        return Finding(check, against, "this engine cannot be captured; rounds run it directly", "not applicable")
    decodes = is_decoder(engine.contract)
    steps = list(_windows(engine, plan) if decodes else _cases(engine, limits))
    if len(steps) < 2:
        why = f"of windows one behind the other {len(steps)} fits the capacity {limits.capacity}: none to replay"
        return Finding(check, against, why, "not applicable")
    kept: Mapping[str, torch.Tensor] = make_rows(engine, len(plan.tokens)).rows(0, len(plan.tokens)) if decodes else {}
    given = {key: values.to(engine.device) for key, values in steps[0].items()}
    outputs = _outputs(engine, given)
    state = {source: given[source] for _, source in engine.contract.aliases if source in given}  # changed in place
    call = engine.bind({**given, **outputs, **kept})
    metrics = Metrics()
    graphs = Graphs(engine.device, metrics)
    different = 0
    for step in steps:
        for key, values in step.items():
            given[key].copy_(values)
        graphs.run(name, call.run, outputs=list(outputs.values()), state=list(state.values()))
        replayed = {key: values.clone() for key, values in (outputs | state).items()}
        for key, values in state.items():
            values.copy_(step[key])
        call.run()
        different += not all(same_bits(replayed[key], values) for key, values in (outputs | state).items())
    replays = metrics.graph_replays
    reason = f"; not replayed: {', '.join(metrics.eager_runs)}" if metrics.eager_runs else ""
    return Finding(
        check,
        against,
        f"{replays} replays with new inputs, {different} of {len(steps)} results different{reason}",
        judged(not different and replays == len(steps) - 1),
        {"replays": replays, "different": different},
    )


def _windows(engine: Engine, plan: Plan) -> Iterator[Inputs]:
    rows, query = len(plan.tokens), max((query for query, _ in plan.steps), default=1)
    for step in range(_TIMES):
        tokens = [row[step * query : (step + 1) * query] for row in plan.tokens]
        if len(tokens[0]) == query:
            given = windows(engine.contract, torch.tensor(tokens), torch.arange(query).repeat(rows, 1))
            states = {name: each for name, each in with_states(engine.contract, given).items() if name == "states"}
            yield {**given, **states, "write_index": torch.full((rows,), step * query)}


def _cases(engine: Engine, limits: Limits) -> Iterator[Inputs]:
    if not any(binding.name == "logits" for binding in engine.contract.inputs):  # what fuses a target's features
        for seed in range(_TIMES):
            draw = torch.Generator().manual_seed(seed)
            yield {
                b.name: torch.randn(b.resolve({"tokens": limits.batch}), generator=draw).to(getattr(torch, b.dtype))
                for b in engine.contract.inputs
            }
        return
    logits = engine.contract["logits"]
    adjusts = any(binding.name == "entry_len" for binding in engine.contract.inputs)
    verifies = any(binding.name == "draft_tokens" for binding in engine.contract.inputs)
    size: dict[str, Any] = {"vocab": int(logits.shape[2]), "window": limits.window if verifies else 0}
    for seed in range(_TIMES):
        size["batch"], size["seed"] = min(4, limits.batch), seed
        case = (
            adjust_case(**size, columns=min(64, size["vocab"])) if adjusts else awkward_case(**size, dtype=logits.dtype)
        )
        yield {
            b.name: torch.from_numpy(np.ascontiguousarray(case[b.name])).to(getattr(torch, b.dtype))
            for b in engine.contract.inputs
        }


def _outputs(engine: Engine, given: Inputs) -> Inputs:
    sizes: dict[str, int] = {}
    for binding in engine.contract.inputs:
        shape = given[binding.name].shape if binding.name in given else ()
        sizes |= {dim: size for dim, size in zip(binding.shape, shape, strict=False) if isinstance(dim, str)}
    aliased = {output for output, _ in engine.contract.aliases}
    return {
        b.name: torch.zeros(b.resolve(sizes), dtype=getattr(torch, b.dtype), device=engine.device)
        for b in engine.contract.outputs
        if b.name not in aliased
    }
