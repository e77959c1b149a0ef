"""Verification on a CPU gives the result of its definition, whether numpy or the graph decides a batch."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.sampling_parameters import FILTERS
from tandemrt.export.graph.builder import save_model
from tandemrt.export.model.weightless import build_verify
from tandemrt.plugins.reference import token_bitmask, verify_draft
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.backends.onnxruntime.engine import OnnxRuntimeEngine
from tandemrt.runtime.device.backends.onnxruntime.greedy_verification import GreedyVerification
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
    sampled=st.booleans(),
)
def test_a_batch_gets_the_tokens_of_the_definition(
    graph: OnnxRuntimeEngine, batch: int, window: int, seed: int, mask: str, odd: bool, sampled: bool
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
    sampling: dict[str, Any] = {
        "temperature": np.where(np.arange(batch) == 0, np.float32(sampled), np.float32(0)).astype(np.float32),
        **{name: np.full(batch, parameter.off, parameter.dtype) for name, parameter in FILTERS.items()},
        "seed": random.integers(0, 99, batch),
        "position": random.integers(0, 99, batch),
        "rule": random.integers(0, 2, batch),
    }
    given_tensors = {"logits": logits, "bitmask": bitmask, "draft_tokens": draft.astype(np.int64)}
    given_tensors["draft_len"] = random.integers(0, window + 1, batch)
    outputs = {"tokens": np.full((batch, rows), 7, np.int64), "count": np.full(batch, 7, np.int64)}
    bound = {**given_tensors, **sampling, **outputs}
    tensors = {b.name: bound[b.name].astype(b.dtype) for b in (*graph.contract.inputs, *graph.contract.outputs)}
    tensors = {name: torch.tensor(array) for name, array in tensors.items()}
    state = SlotState(batch, graph.device)
    state.newest.copy_(torch.tensor(random.integers(0, VOCAB, (batch, 2))))
    before, moving = state.newest.numpy().copy(), state.advance_tensors(batch)
    engine = GreedyVerification(graph.contract, graph.device, lambda: graph)
    call: Any = engine.bind_advancing(tensors, moving)
    call._graph = counted = CountedCall(call._graph)
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
    assert counted.runs == (sampled or bool(wrong.any()))
