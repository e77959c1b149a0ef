"""Verification and drafting on a CPU give the results of their definitions, whether numpy or the graph decides."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.sampling_parameters import FILTERS
from tandemrt.export.graph.builder import save_model
from tandemrt.export.model.weightless import build_propose, build_verify
from tandemrt.plugins.operators.constants import Rule
from tandemrt.plugins.reference import sample_draft, token_bitmask, verify_draft
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.backends.onnxruntime import host_decisions
from tandemrt.runtime.device.backends.onnxruntime.engine import OnnxRuntimeEngine
from tandemrt.runtime.device.backends.onnxruntime.host_decisions import HostDrafting, HostVerification
from tandemrt.runtime.device.backends.onnxruntime.token_choice import RowSampling, drawn_column
from tandemrt.runtime.device.slot_state import SlotState

VOCAB = 70
SCORES = (0.0, 1.0, 2.0, -3.0, -np.inf)
NOT_SCORES = (np.inf, np.nan)


class CountedCall:
    def __init__(self, call: Any) -> None:
        self.call, self.runs = call, 0

    def run(self) -> None:
        self.runs += 1
        self.call.run()


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> OnnxRuntimeEngine:
    path = tmp_path_factory.mktemp("verify") / "verify.onnx"
    save_model(build_verify(vocab=VOCAB, dtype="float32", draft_probs=False), path)
    return OnnxRuntimeEngine.open(path, contract.verify(vocab=VOCAB, dtype="float32", draft_probs=False), threads=1)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 3),
    window=st.integers(0, 3),
    seed=st.integers(0, 9999),
    mask=st.sampled_from(["all", "random", "none", "one row"]),
    odd=st.booleans(),
    rejecting=st.booleans(),
    wide=st.booleans(),
)
def test_a_batch_gets_the_tokens_of_the_definition(
    graph: OnnxRuntimeEngine, batch: int, window: int, seed: int, mask: str, odd: bool, rejecting: bool, wide: bool
) -> None:
    random, rows, words = np.random.default_rng(seed), window + 1, -(-VOCAB // 32)
    logits = random.choice(SCORES + NOT_SCORES * odd, (batch, rows, VOCAB)).astype(np.float32)
    bitmask = np.full((batch, rows, words), 0 if mask == "none" else -1, np.int32)
    if mask == "random":
        bitmask[:] = random.integers(-(2**31), 2**31, bitmask.shape)
    elif mask == "one row":
        bitmask[-1, -1] = 0
    best = np.nan_to_num(token_bitmask(logits, bitmask), posinf=-np.inf).argmax(-1)
    draft = np.where(random.random((batch, window)) < 0.8, best[:, :window], random.integers(-1, VOCAB + 2, window))
    sampling = sampling_of(random, batch, rejecting=rejecting)
    given_tensors = {"logits": logits, "bitmask": bitmask, "draft_tokens": draft.astype(np.int64)}
    given_tensors["draft_len"] = random.integers(0, window + 1, batch)
    outputs = {"tokens": np.full((batch, rows), 7, np.int64), "count": np.full(batch, 7, np.int64)}
    bound = {**given_tensors, **sampling, **outputs}
    tensors = {b.name: bound[b.name].astype(b.dtype) for b in (*graph.contract.inputs, *graph.contract.outputs)}
    tensors = {name: torch.tensor(array) for name, array in tensors.items()}
    state = SlotState(batch, graph.device)
    state.newest.copy_(torch.tensor(random.integers(0, VOCAB, (batch, 2))))
    before, moving = state.newest.numpy().copy(), state.advance_tensors(batch)
    engine = HostVerification(graph.contract, graph.device, lambda: graph)
    with patch.object(host_decisions, "WIDE", VOCAB + 1 - wide):
        call: Any = engine.bind_advancing(tensors, moving)
    counted = CountedCall(call._bound.graph)
    call._bound = replace(call._bound, bind_graph=lambda: counted)
    call.run()

    masked = token_bitmask(logits, bitmask)
    expected = verify_draft(masked, given_tensors["draft_tokens"], given_tensors["draft_len"], **sampling)
    np.testing.assert_array_equal(tensors["tokens"].numpy(), expected[0])
    np.testing.assert_array_equal(tensors["count"].numpy(), expected[1])
    for row, (last, emitted, count) in enumerate(zip(before, *expected, strict=True)):
        np.testing.assert_array_equal(state.newest.numpy()[row], [*last, *emitted[:count]][-2:])
    for name in SlotState.PLACE:
        np.testing.assert_array_equal(moving[name].numpy(), expected[1])
    wrong = np.isnan(masked) | np.isposinf(masked)
    assert counted.runs == (needs_graph(sampling, wide=wide) or bool(wrong.any()))


@pytest.fixture(scope="module", params=[False, True], ids=["", "target ids"])
def drafting_graph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnnxRuntimeEngine:
    sizes: dict[str, Any] = {"vocab": VOCAB, "dtype": "float32", "draft_probs": False, "target_ids": request.param}
    path = tmp_path_factory.mktemp("propose") / "propose.onnx"
    save_model(build_propose(**sizes), path)
    return OnnxRuntimeEngine.open(path, contract.propose(**sizes), threads=1)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 3), seed=st.integers(0, 9999), odd=st.booleans(), rejecting=st.booleans(), wide=st.booleans()
)
def test_a_batch_of_drafts_gets_the_tokens_of_the_definition(
    drafting_graph: OnnxRuntimeEngine, batch: int, seed: int, odd: bool, rejecting: bool, wide: bool
) -> None:
    random, graph = np.random.default_rng(seed), drafting_graph
    logits = random.choice(SCORES + NOT_SCORES * odd, (batch, 1, VOCAB)).astype(np.float32)
    logits[-1] = -np.inf if seed % 5 == 0 else logits[-1]
    sampling = sampling_of(random, batch, rejecting=rejecting)
    ids = np.sort(random.choice(5 * VOCAB, VOCAB, replace=False)).astype(np.int32)
    has_ids = "target_ids" in {binding.name for binding in graph.contract.inputs}
    bound = {"logits": logits, **sampling, "target_ids": ids, "token": np.full(batch, 7, np.int64)}
    tensors = {b.name: bound[b.name].astype(b.dtype) for b in (*graph.contract.inputs, *graph.contract.outputs)}
    tensors = {name: torch.tensor(array) for name, array in tensors.items()}
    with patch.object(host_decisions, "WIDE", VOCAB + 1 - wide):
        call: Any = HostDrafting(graph.contract, graph.device, lambda: graph).bind(tensors)
    counted = CountedCall(call._bound.graph)
    call._bound = replace(call._bound, bind_graph=lambda: counted)
    call.run()

    expected, _ = sample_draft(logits, target_ids=ids if has_ids else None, **sampling)
    np.testing.assert_array_equal(tensors["token"].numpy(), expected)
    wrong = np.isnan(logits) | np.isposinf(logits)
    assert counted.runs == (needs_graph(sampling, wide=wide) or bool(wrong.any()))


def sampling_of(random: np.random.Generator, batch: int, *, rejecting: bool) -> dict[str, Any]:
    """Return random sampling parameters; greedy requests are among them, and rejecting ones if ``rejecting``."""
    return {
        "temperature": random.choice([0, 0.3, 1, 2.5], batch).astype(np.float32),
        **{name: random.choice(row.cases, batch).astype(row.dtype) for name, row in FILTERS.items()},
        "seed": random.integers(-(2**63), 2**63 - 1, batch),
        "position": random.integers(0, 2**40, batch),
        "rule": random.integers(0, 2, batch) * rejecting,
    }


def needs_graph(sampling: dict[str, Any], *, wide: bool) -> bool:
    sampled = sampling["temperature"] > 0
    return bool((sampled & (sampling["rule"] == Rule.REJECTION) if wide else sampled).any())


@settings(max_examples=100)
@given(
    spread=st.sampled_from([0.1, 2.0, 8.0, 40.0]),
    seed=st.integers(0, 9999),
    allowed=st.sampled_from([0.001, 0.5, 1.0]),
    filtered=st.booleans(),
)
def test_tokens_that_are_out_of_reach_change_no_draw(spread: float, seed: int, allowed: float, filtered: bool) -> None:
    random = np.random.default_rng(seed)
    logits = (spread * random.normal(size=3000)).astype(np.float32)
    logits[random.random(3000) > allowed] = -np.inf
    logits[7] = 1.0
    sampling = {name: values[0] for name, values in sampling_of(random, 1, rejecting=False).items()}
    sampling["temperature"] = random.choice([0.01, 0.7, 1.5]).astype(np.float32)
    sampling |= {} if filtered else dict.fromkeys(FILTERS, 0)
    tokens, _ = verify_draft(logits[None, None], np.zeros((1, 0), np.int64), [0], **sampling)
    row = RowSampling(*(sampling[name] for name in RowSampling._fields))
    assert drawn_column(logits, row._replace(seed=int(row.seed), position=int(row.position))) == tokens[0, 0]
