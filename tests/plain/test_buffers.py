"""Buffers between the subgraphs of a decoder: no value is overwritten before its last reader has run."""

from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.decoder import Decoder, Operator, Subgraph
from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.device.backends.onnxruntime.buffer_plan import ALIGNMENT, plan_buffers
from tandemrt.runtime.device.buffers import Buffer

CALLS = [{"batch": 4, "query": 5}, {"batch": 1, "query": 16}]


@st.composite
def decoders(draw: Any) -> tuple[Decoder, Contract]:
    """Random subgraphs. Each reads some existing values and produces one or two; the last one produces the logits."""
    there, steps, values = ["token_ids"], [], []
    for index in range(draw(st.integers(1, 12))):
        read = draw(st.lists(st.sampled_from(there), min_size=1, max_size=4, unique=True))
        outputs = [f"value.{index}.{i}" for i in range(draw(st.integers(1, 2)))]
        for name in outputs:
            dtype = draw(st.sampled_from(["float32", "float16"]))
            values.append(Binding(name, dtype, ("batch", "query", draw(st.integers(1, 300)))))
        steps.append(Subgraph(file=f"{index}.onnx", inputs=tuple(read), outputs=tuple(outputs)))
        there += outputs
    steps.append(Subgraph(file="last.onnx", inputs=(there[-1],), outputs=("logits",)))
    contract = Contract(
        (Binding("token_ids", "int64", ("batch", "query")),), (Binding("logits", "float32", ("batch", "query", 9)),)
    )
    decoder = Decoder(constants=None, steps=tuple(steps), values=tuple(values))
    decoder.check(contract)
    return decoder, contract


@given(decoders())
def test_a_value_shares_no_memory_until_its_last_reader_has_run(drawn: tuple[Decoder, Contract]) -> None:
    decoder, contract = drawn
    buffers = plan_buffers(decoder, contract, CALLS)
    value_of_buffer: dict[int, str] = {}
    for step in decoder.steps:
        before = dict(value_of_buffer)
        for name in step.outputs:
            if name in buffers.buffer_of:
                value_of_buffer[buffers.buffer_of[name]] = name
        for name in step.inputs:
            if name in buffers.buffer_of:
                assert before[buffers.buffer_of[name]] == name, "it holds what was written there"
                assert value_of_buffer[buffers.buffer_of[name]] == name, "the step that reads it does not write there"
        assert all(
            value_of_buffer[buffers.buffer_of[name]] == name for name in step.outputs if name in buffers.buffer_of
        )


@given(decoders())
def test_a_buffer_fits_each_of_its_values_in_the_largest_calls(drawn: tuple[Decoder, Contract]) -> None:
    decoder, contract = drawn
    buffers = plan_buffers(decoder, contract, CALLS)
    assert set(buffers.buffer_of) == {value.name for value in decoder.values}
    for value in decoder.values:
        width = {"float32": 4, "float16": 2}[value.dtype]
        assert all(buffers.sizes[buffers.buffer_of[value.name]] >= width * prod(value.resolve(c)) for c in CALLS)
    assert all(size % ALIGNMENT == 0 for size in buffers.sizes)


def test_a_chain_of_any_length_needs_two_buffers() -> None:
    names = ["token_ids", *(f"value.{i}" for i in range(20)), "logits"]
    steps = tuple(
        Subgraph(file=f"{i}.onnx", inputs=(one,), outputs=(two,)) for i, (one, two) in enumerate(pairwise(names))
    )
    values = tuple(Binding(name, "float16", ("batch", "query", 8 + i)) for i, name in enumerate(names[1:-1]))
    contract = Contract((Binding("token_ids", "int64", ("batch",)),), (Binding("logits", "float32", ("batch",)),))
    assert len(plan_buffers(Decoder(constants=None, steps=steps, values=values), contract, CALLS).sizes) == 2


def test_an_input_changed_in_place_keeps_its_memory_until_the_result_is_read() -> None:
    wanted = [binding.name for binding in SCHEMAS["adjust_logits"].inputs]
    inputs = [Binding(name, "float32", ("batch",)) for name in ("token_ids", *wanted[1:])]
    steps = (
        Subgraph(file="a.onnx", inputs=("token_ids",), outputs=("scores",)),
        Operator(name="adjust_logits", inputs=("scores", *wanted[1:]), outputs=("adjusted",), attributes={}),
        Subgraph(file="b.onnx", inputs=("token_ids",), outputs=("other",)),
        Subgraph(file="c.onnx", inputs=("adjusted", "other"), outputs=("logits",)),
    )
    values = tuple(Binding(name, "float32", ("batch", 9)) for name in ("scores", "adjusted", "other"))
    contract = Contract(tuple(inputs), (Binding("logits", "float32", ("batch",)),))
    buffers = plan_buffers(Decoder(constants=None, steps=steps, values=values), contract, CALLS)
    assert buffers.in_place_of == {"adjusted": "scores"}
    assert set(buffers.buffer_of) == {"scores", "other"}
    assert buffers.buffer_of["scores"] != buffers.buffer_of["other"]


def test_a_value_of_unknown_size_is_an_error_with_its_name() -> None:
    contract = Contract((Binding("token_ids", "int64", ("batch",)),), (Binding("logits", "float32", ("batch",)),))
    steps = (
        Subgraph(file="a.onnx", inputs=("token_ids",), outputs=("hidden",)),
        Subgraph(file="b.onnx", inputs=("hidden",), outputs=("logits",)),
    )
    decoder = Decoder(constants=None, steps=steps, values=(Binding("hidden", "float32", ("batch", "experts")),))
    with pytest.raises(InternalError, match=r"hidden float32\[batch, experts\]: its size depends on 'experts'"):
        plan_buffers(decoder, contract, CALLS)


def test_a_buffer_is_on_the_device_of_its_engine() -> None:
    assert Buffer((2, 3), torch.int64, torch.device("meta")).view(2).device.type == "meta"
