"""The memory between the steps of a decoder: whatever the steps are, nothing is overwritten before it was read."""

from itertools import pairwise
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.binding import Binding
from tandemrt.engines.contract import Contract
from tandemrt.engines.decoder import Decoder, Operator, Piece
from tandemrt.engines.errors import InternalError
from tandemrt.engines.operators import SCHEMAS
from tandemrt.runtime.backends.buffers import ALIGNMENT, plan_buffers

CALLS = [{"batch": 4, "query": 5}, {"batch": 1, "query": 16}]


@st.composite
def decoders(draw: Any) -> tuple[Decoder, Contract]:
    """Pieces that each read some of what is there and make one or two values; the last one makes the logits."""
    there, steps, values = ["token_ids"], [], []
    for index in range(draw(st.integers(1, 12))):
        read = draw(st.lists(st.sampled_from(there), min_size=1, max_size=4, unique=True))
        made = [f"value.{index}.{i}" for i in range(draw(st.integers(1, 2)))]
        for name in made:
            dtype = draw(st.sampled_from(["float32", "float16"]))
            values.append(Binding(name, dtype, ("batch", "query", draw(st.integers(1, 300)))))
        steps.append(Piece(file=f"{index}.onnx", inputs=tuple(read), outputs=tuple(made)))
        there += made
    steps.append(Piece(file="last.onnx", inputs=(there[-1],), outputs=("logits",)))
    contract = Contract(
        (Binding("token_ids", "int64", ("batch", "query")),), (Binding("logits", "float32", ("batch", "query", 9)),)
    )
    decoder = Decoder(constants=None, steps=tuple(steps), values=tuple(values))
    decoder.check(contract)
    return decoder, contract


@given(decoders())
def test_a_value_is_alone_in_its_memory_until_its_last_reader_has_run(made: tuple[Decoder, Contract]) -> None:
    decoder, contract = made
    buffers = plan_buffers(decoder, contract, CALLS)
    held: dict[int, str] = {}
    for step in decoder.steps:
        before = dict(held)
        for name in step.outputs:
            if name in buffers.place:
                held[buffers.place[name]] = name
        for name in step.inputs:
            if name in buffers.place:
                assert before[buffers.place[name]] == name, "it holds what was written there"
                assert held[buffers.place[name]] == name, "the step that reads it does not write there"
        assert all(held[buffers.place[name]] == name for name in step.outputs if name in buffers.place)


@given(decoders())
def test_a_buffer_holds_each_of_its_values_in_each_of_the_largest_calls(made: tuple[Decoder, Contract]) -> None:
    decoder, contract = made
    buffers = plan_buffers(decoder, contract, CALLS)
    assert set(buffers.place) == {value.name for value in decoder.values}
    for value in decoder.values:
        width = {"float32": 4, "float16": 2}[value.dtype]
        assert all(buffers.sizes[buffers.place[value.name]] >= width * prod(value.resolve(c)) for c in CALLS)
    assert all(size % ALIGNMENT == 0 for size in buffers.sizes)


def test_a_chain_of_any_length_needs_two_buffers() -> None:
    names = ["token_ids", *(f"value.{i}" for i in range(20)), "logits"]
    steps = tuple(
        Piece(file=f"{i}.onnx", inputs=(one,), outputs=(two,)) for i, (one, two) in enumerate(pairwise(names))
    )
    values = tuple(Binding(name, "float16", ("batch", "query", 8 + i)) for i, name in enumerate(names[1:-1]))
    contract = Contract((Binding("token_ids", "int64", ("batch",)),), (Binding("logits", "float32", ("batch",)),))
    assert len(plan_buffers(Decoder(constants=None, steps=steps, values=values), contract, CALLS).sizes) == 2


def test_what_an_operator_changes_in_place_keeps_its_memory_until_the_result_was_read() -> None:
    wanted = [binding.name for binding in SCHEMAS["adjust_logits"].inputs]
    given = [Binding(name, "float32", ("batch",)) for name in ("token_ids", *wanted[1:])]
    steps = (
        Piece(file="a.onnx", inputs=("token_ids",), outputs=("scores",)),
        Operator(name="adjust_logits", inputs=("scores", *wanted[1:]), outputs=("adjusted",), attributes={}),
        Piece(file="b.onnx", inputs=("token_ids",), outputs=("other",)),
        Piece(file="c.onnx", inputs=("adjusted", "other"), outputs=("logits",)),
    )
    values = tuple(Binding(name, "float32", ("batch", 9)) for name in ("scores", "adjusted", "other"))
    contract = Contract(tuple(given), (Binding("logits", "float32", ("batch",)),))
    buffers = plan_buffers(Decoder(constants=None, steps=steps, values=values), contract, CALLS)
    assert buffers.home == {"adjusted": "scores"}
    assert set(buffers.place) == {"scores", "other"}
    assert buffers.place["scores"] != buffers.place["other"]


def test_a_size_that_no_call_says_is_an_error_that_names_the_value() -> None:
    contract = Contract((Binding("token_ids", "int64", ("batch",)),), (Binding("logits", "float32", ("batch",)),))
    steps = (
        Piece(file="a.onnx", inputs=("token_ids",), outputs=("hidden",)),
        Piece(file="b.onnx", inputs=("hidden",), outputs=("logits",)),
    )
    decoder = Decoder(constants=None, steps=steps, values=(Binding("hidden", "float32", ("batch", "experts")),))
    with pytest.raises(InternalError, match=r"hidden float32\[batch, experts\]: its size depends on 'experts'"):
        plan_buffers(decoder, contract, CALLS)
