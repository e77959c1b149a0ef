"""States of recurrent layers over a paged cache: who owns a slot, and where its text continues."""

from collections.abc import Mapping

import pytest

from tandemrt.engines.contract.contract import BLOCK_SIZE, RecurrentState, decoder, num_snapshots
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.kv_cache import BlockTable, PagedCache
from tandemrt.runtime.caches.recurrent import PromptRuns, RecurrentStates, Snapshots

CPU, SLOTS = torch.device("cpu"), 2
HASHES = [b"first", b"second"]


class Recorder:
    """A call that records the ``prompt_state_index`` that it reads."""

    def __init__(self, covered: torch.Tensor) -> None:
        self.covered, self.read = covered, list[int]()

    def run(self) -> None:
        self.read = self.covered.tolist()


class Text:
    """A table of two slots, and the states of one layer."""

    def __init__(self) -> None:
        self.table = BlockTable(SLOTS, 4, 9, CPU)
        self.state = torch.zeros(SLOTS, 1)
        self.states = RecurrentStates({"past_state.0": self.state}, SLOTS, CPU)
        self.table.add(self.states)

    def write(self, slot: int, tokens: int, value: float) -> None:
        """Let the state of ``slot`` cover ``tokens`` tokens, as a call does."""
        self.state[slot] = value
        self.states.indices(slot, 1)["state_index"].fill_(tokens)


@pytest.fixture(params=[False, True], ids=["the host reads at once", "the host would wait"])
def text(request: pytest.FixtureRequest) -> Text:
    text = Text()
    text.states.waits = request.param
    return text


def test_a_slot_begins_a_text_whatever_its_last_owner_left(text: Text) -> None:
    text.write(1, 100, 7.0)
    assert text.table.reserve(1, 20) == 0
    text.table.flush()
    assert text.states.covered(1) == 0


def test_a_prefix_is_reused_up_to_a_copy_of_its_states(text: Text) -> None:
    text.table.reserve(0, 2 * BLOCK_SIZE + 1, HASHES)
    text.write(0, BLOCK_SIZE - 1, 1.0)  # one token before the end of the first block, as after a prompt's chunk
    text.table.register_prefix(0, HASHES[:1])
    text.write(0, 2 * BLOCK_SIZE + 1, 2.0)  # a later token than the end of the second
    text.table.register_prefix(0, HASHES)
    assert text.table.reserve(1, 2 * BLOCK_SIZE + 1, HASHES) == BLOCK_SIZE
    assert (text.states.covered(1), text.state[1].item()) == (BLOCK_SIZE - 1, 1.0)
    text.table.flush()
    first, second = text.table.device[:, :2].tolist()
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, False]  # it writes the second


def test_the_host_waits_for_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text()
    text.states.waits = True
    text.table.reserve(0, BLOCK_SIZE + 1, HASHES[:1])
    text.write(0, BLOCK_SIZE, 1.0)
    monkeypatch.setattr(type(text.state), "__int__", lambda _: pytest.fail("the host reads a number"))
    text.table.register_prefix(0, HASHES[:1])
    monkeypatch.undo()
    assert text.table.reserve(1, BLOCK_SIZE + 1, HASHES[:1]) == BLOCK_SIZE


def test_blocks_without_a_copy_of_the_states_are_not_reused(text: Text) -> None:
    text.table.reserve(0, BLOCK_SIZE, HASHES[:1])
    text.write(0, BLOCK_SIZE, 1.0)
    text.table.register_prefix(0, HASHES[:1], of_prompt=False)
    assert text.table.reserve(1, BLOCK_SIZE, HASHES[:1]) == 0


def test_the_oldest_copies_go_first(text: Text) -> None:
    names = [bytes([at]) for at in range(num_snapshots(SLOTS, "paged") + 1)]
    for name in names:
        text.table.reserve(0, BLOCK_SIZE, [name])
        text.write(0, BLOCK_SIZE, 1.0)
        text.table.register_prefix(0, [name])
        text.table.leave(0)
    assert text.table.reserve(1, BLOCK_SIZE, names[:1]) == 0
    text.table.leave(1)
    assert text.table.reserve(1, BLOCK_SIZE, names[-1:]) == BLOCK_SIZE


def test_a_copy_that_is_taken_again_is_the_newest(text: Text) -> None:
    snapshots = Snapshots()
    snapshots.add(text.states, most=3)
    text.write(0, BLOCK_SIZE, 1.0)
    for name in (b"a", b"b", b"c", b"a", b"d"):
        snapshots.take(0, [name])
    assert [snapshots.longest([name]) for name in (b"a", b"b", b"c", b"d")] == [1, 0, 1, 1]


def test_a_run_reads_the_index_of_the_states_before_it_and_leaves_that_of_its_last_token(text: Text) -> None:
    text.write(1, 9, 1.0)
    runs = PromptRuns(torch.tensor([1]), torch.tensor([0, 5]), torch.tensor([10]), torch.zeros(1, dtype=torch.int64))
    call = Recorder(runs.covered)
    text.states.with_runs(call, runs).run()
    assert (call.read, text.states.covered(1)) == ([9], 14)


class Reader:
    """A decoder with a recurrent layer whose calls only record the ``prompt_state_index`` that they read."""

    capturable = False
    device = CPU
    contract = decoder(
        layers=1,
        kv_heads=1,
        head_dim=1,
        capacity=96,
        vocab=8,
        dtype="float32",
        cache="paged",
        recurrent={0: RecurrentState((1, 1, 1), 1)},
        history=4,
    )

    def bind(self, tensors: Mapping[str, torch.Tensor], *, needs_probs: bool = True) -> Recorder:  # noqa: ARG002
        return Recorder(tensors["prompt_state_index"])


@pytest.mark.parametrize("slot", range(SLOTS))
def test_a_call_without_windows_moves_the_states_of_its_prompts_alone(slot: int) -> None:
    table = BlockTable(SLOTS, 4, 9, CPU)
    cache = PagedCache(Reader(), table)
    (states,) = table._snapshots._models
    expected = [9, 20]
    for each, tokens in enumerate(expected):
        states.indices(each, 1)["state_index"].fill_(tokens)
    run = {
        "token_ids": torch.tensor([3, 4, 5]),
        "write_index": torch.zeros(1, dtype=torch.int64),
        "prompt_rows": torch.zeros(3, dtype=torch.int32),
        "prompt_starts": torch.tensor([0, 3], dtype=torch.int32),
        "prompt_index": torch.tensor([expected[slot] + 1]),
    }
    cache.bind(Reader(), 0, run, prompt_slots=torch.tensor([slot])).run()
    expected[slot] += 3  # the states stay one token before the end of the run
    assert [states.covered(each) for each in range(SLOTS)] == expected
