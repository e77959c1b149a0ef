"""Compare engines replayed as CUDA graphs with the same engines run directly, on inputs that change."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.engines.bundle.manifest import Limits
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.caches.kv_cache import window_bindings
from tandemrt.runtime.check.adjust_logits import edge_case_adjust_batch
from tandemrt.runtime.check.cases import edge_case_batch
from tandemrt.runtime.check.decoder_run import DecodePlan, is_decoder, make_cache, state_tensors
from tandemrt.runtime.check.result import CheckResult, passed_if
from tandemrt.runtime.device.backends.base import Engine
from tandemrt.runtime.device.graphs import Graphs, same_bits

_RUNS = 3  # the first run captures the graph, the others replay it
Inputs = dict[str, Any]


def check_replay(name: str, engine: Engine, limits: Limits, plan: DecodePlan) -> CheckResult:
    """Run ``engine`` through a graph and directly. The outputs must be the same bits."""
    check, against = f"graph replay of {name}", "the same engine run directly"
    if device_of(engine.device).on_host:
        return CheckResult(check, against, "a CPU has no CUDA graphs", "not applicable")
    if not engine.capturable:
        return CheckResult(check, against, "this engine cannot be captured; rounds run it directly", "not applicable")
    decodes = is_decoder(engine.contract)
    steps = list(_decoder_inputs(engine, plan) if decodes else _operator_inputs(engine, limits))
    if len(steps) < 2:
        why = f"only {len(steps)} consecutive call fits the capacity {limits.capacity}: none to replay"
        return CheckResult(check, against, why, "not applicable")
    cache: Mapping[str, Any] = make_cache(engine, len(plan.tokens)).rows(0, len(plan.tokens)) if decodes else {}
    inputs = {key: values.to(engine.device) for key, values in steps[0].items()}
    outputs = _outputs(engine, inputs)
    state = {source: inputs[source] for _, source in engine.contract.aliases if source in inputs}  # updated in place
    call = engine.bind({**inputs, **outputs, **cache})
    graphs = Graphs(engine.device)
    metrics = graphs.metrics
    different = 0
    for step in steps:
        for key, values in step.items():
            inputs[key].copy_(values)
        graphs.run(name, call.run, outputs=list(outputs.values()), state=list(state.values()))
        replayed = {key: values.clone() for key, values in (outputs | state).items()}
        for key, values in state.items():
            values.copy_(step[key])
        call.run()
        different += not all(same_bits(replayed[key], values) for key, values in (outputs | state).items())
    replays = metrics.graph_replays
    reason = f"; not replayed: {', '.join(metrics.eager_runs)}" if metrics.eager_runs else ""
    return CheckResult(
        check,
        against,
        f"{replays} replays with new inputs, {different} of {len(steps)} results different{reason}",
        passed_if(not different and replays == len(steps) - 1),
        {"replays": replays, "different": different},
    )


def _decoder_inputs(engine: Engine, plan: DecodePlan) -> Iterator[Inputs]:
    rows, query = len(plan.tokens), max((query for query, _ in plan.steps), default=1)
    for step in range(_RUNS):
        tokens = [row[step * query : (step + 1) * query] for row in plan.tokens]
        if len(tokens[0]) == query:
            tensors = window_bindings(engine.contract, torch.tensor(tokens), torch.arange(query).repeat(rows, 1))
            states = {name: each for name, each in state_tensors(engine.contract, tensors).items() if name == "states"}
            yield {**tensors, **states, "write_index": torch.full((rows,), step * query)}


def _operator_inputs(engine: Engine, limits: Limits) -> Iterator[Inputs]:
    if not any(
        binding.name == "logits" for binding in engine.contract.inputs
    ):  # the engine ``fuse``, which combines the target's features
        for seed in range(_RUNS):
            draw = torch.Generator().manual_seed(seed)
            yield {
                b.name: torch.randn(b.resolve({"tokens": limits.batch}), generator=draw).to(getattr(torch, b.dtype))
                for b in engine.contract.inputs
            }
        return
    logits = engine.contract["logits"]
    adjusts = any(binding.name == "entry_len" for binding in engine.contract.inputs)
    verifies = any(binding.name == "draft_tokens" for binding in engine.contract.inputs)
    size: dict[str, Any] = {"vocab": int(logits.shape[2]), "window": limits.num_draft_tokens if verifies else 0}
    for seed in range(_RUNS):
        size["batch"], size["seed"] = min(4, limits.batch), seed
        case = (
            edge_case_adjust_batch(**size, columns=min(64, size["vocab"]))
            if adjusts
            else edge_case_batch(**size, dtype=logits.dtype)
        )
        yield {
            b.name: torch.from_numpy(np.ascontiguousarray(case[b.name])).to(getattr(torch, b.dtype))
            for b in engine.contract.inputs
        }


def _outputs(engine: Engine, inputs: Inputs) -> Inputs:
    sizes: dict[str, int] = {}
    for binding in engine.contract.inputs:
        shape = inputs[binding.name].shape if binding.name in inputs else ()
        sizes |= {dim: size for dim, size in zip(binding.shape, shape, strict=False) if isinstance(dim, str)}
    aliased = {output for output, _ in engine.contract.aliases}
    return {
        b.name: torch.zeros(b.resolve(sizes), dtype=getattr(torch, b.dtype), device=engine.device)
        for b in engine.contract.outputs
        if b.name not in aliased
    }
