"""What the device believes of a slot is what a list of tokens would say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.contract.sampling_parameters import FILTERS
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.slot_state import SlotParams, SlotPosition, SlotState

SLOTS = 3
FIRST: SlotParams = {"temperature": 0.5, "seed": 1, "rule": 0, "draft_temperature": 0.5, **dict.fromkeys(FILTERS, 7)}
SECOND: SlotParams = {
    "temperature": 2.0,
    **{
        name: number / 8 if parameter.dtype == "float32" else number
        for number, (name, parameter) in enumerate(FILTERS.items(), 1)
    },
    "seed": 1,
    "rule": 1,
    "draft_temperature": 0.0,
}
WINDOW = st.integers(0, 4)


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=3),
    st.lists(WINDOW.flatmap(lambda k: st.tuples(st.just(k), st.lists(st.lists(st.integers(0, 99), max_size=k + 1),
             min_size=SLOTS, max_size=SLOTS))), max_size=6),
)  # fmt: skip
def test_slots_advance_as_their_texts_grow(prompt: list[int], rounds: list[tuple[int, list[list[int]]]]) -> None:
    state = SlotState(SLOTS, torch.device("cpu"))
    texts = [list(prompt) for _ in range(SLOTS)]
    for slot in range(SLOTS):
        state.place(SlotPosition.of(slot, prompt, len(prompt) - 1))
    state.flush()
    for window, emitted in rounds:
        padded = [row + [-1] * (window + 1 - len(row)) for row in emitted]
        state.advance(torch.tensor(padded), torch.tensor([len(row) for row in emitted]))
        for text, row in zip(texts, emitted, strict=True):
            text += row
    assert state.view("length", SLOTS).tolist() == [len(text) - 1 for text in texts]
    assert state.view("position", SLOTS).tolist() == [len(text) for text in texts]
    assert state.newest.tolist() == [[text[max(0, len(text) - 2)], text[-1]] for text in texts]


def test_a_slot_that_is_vacated_stands_at_the_beginning_and_leaves_its_neighbours_alone() -> None:
    state = SlotState(SLOTS, torch.device("cpu"))
    for slot in range(SLOTS):
        state.set_params(slot, FIRST)
        state.place(SlotPosition(slot, length=5, last=2, previous=1))
    state.flush()
    state.leave(1)
    assert state.view("length", SLOTS).tolist() == [5, 5, 5]
    state.flush()
    assert state.view("length", SLOTS).tolist() == [5, 0, 5]
    assert state.view("temperature", SLOTS).tolist() == [0.5, 0, 0.5]
    assert state.view("top_k", SLOTS).tolist() == [7, 0, 7]
    assert state.newest.tolist() == [[1, 2], [0, 0], [1, 2]]


def test_the_tensors_that_an_engine_advances_are_those_of_the_first_slots() -> None:
    state = SlotState(SLOTS, torch.device("cpu"))
    tensors = state.advance_tensors(2)
    assert {name: tuple(each.shape) for name, each in tensors.items()} == {
        "length": (2,),
        "position": (2,),
        "newest": (2, 2),
    }
    for number, each in enumerate(tensors.values(), 1):
        each.add_(number)
    assert state.view("length", SLOTS).tolist() == [1, 1, 0]
    assert state.view("position", SLOTS).tolist() == [2, 2, 0]
    assert state.newest.tolist() == [[3, 3], [3, 3], [0, 0]]


def test_parameters_are_uploaded_once() -> None:
    state = SlotState(SLOTS, torch.device("cpu"))
    state.set_params(0, FIRST)
    state.flush()
    state.view("temperature", SLOTS).fill_(4.0)
    state.set_params(2, SECOND)
    state.flush()
    assert state.view("temperature", SLOTS).tolist() == [4.0, 4.0, 2.0]
    state.view("temperature", SLOTS).fill_(5.0)
    state.flush()
    assert state.view("temperature", SLOTS).tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_a_slot_samples_as_its_newest_request_asked(seed: int) -> None:
    state = SlotState(SLOTS, torch.device("cpu"))
    state.set_params(1, FIRST)
    state.flush()
    state.set_params(1, {**SECOND, "seed": seed})
    state.set_params(2, dict.fromkeys(SECOND, 1))
    state.leave(2)
    state.flush()
    expected = {**SECOND, "seed": seed, "position": 0}
    own = expected.pop("draft_temperature")
    assert {name: values.tolist()[1] for name, values in state.sampling(SLOTS).items()} == expected
    drafting = state.drafting(SLOTS)
    assert drafting.pop("temperature").tolist()[1] == own
    assert {name: values.tolist()[1] for name, values in drafting.items()}.items() <= expected.items()
    assert all(values.tolist()[0] == values.tolist()[2] == 0 for values in state.sampling(SLOTS).values())
