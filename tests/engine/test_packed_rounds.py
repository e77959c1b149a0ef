"""Packed calls hold prompts next to the draft windows of a round. Every text equals that of its request alone.

The executor for GPUs runs the subgraphs of a paged bundle on a CPU. Models are random, so a missing, doubled or
misplaced token changes the text.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt import LLM, RequestOutput, SamplingParams, StreamOutput
from tandemrt.engines.contract.calls import NO_PROMPTS
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.export.bundle.build import build
from tandemrt.runtime.engine_loop.capture import capture
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.round import Round
from tests.engine.test_paged_rounds import PAGED
from tests.makers import tiny_checkpoint, write_recipe
from tests.waiting import PATIENCE_S

CHUNK, LENGTH, SLOTS = 128, 160, 4
DRAFTING = {"model": "", "ngram": 'kind = "ngram"\nnum_draft_tokens = 4\nngram_min = 1', "none": 'kind = "none"'}
# Prompts of 1 token, around a block of 64, and up to the engine's length: prompt tokens and output tokens.
SIZES = [(1, 12), (2, 9), (17, 12), (63, 6), (64, 6), (65, 6), (100, 8), (LENGTH - 1, 1)]
ASKED = [
    ([(5 * i * i + 3 * at) % 199 for at in range(tokens)], {"max_tokens": output, "seed": i, "ignore_eos": True})
    for i, (tokens, output) in enumerate(SIZES)
]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packed")
    target = tiny_checkpoint(folder / "target", seed=1, head_dim=32)
    draft = tiny_checkpoint(folder / "draft", layers=1, seed=1, head_dim=32)
    limits = {"batch": SLOTS, "length": LENGTH, "prefill_chunk": CHUNK}

    def built(name: str, backend: str, **drafting: Any) -> Path:
        recipe = write_recipe(folder / f"{name}.toml", target=target, backend=backend, **drafting, **limits)
        return build(Recipe.load(recipe), folder / name).folder

    linear = built("linear", 'name = "onnxruntime-cpu"')
    return {"linear": linear} | {
        kind: built(kind, PAGED, **({"draft": draft} if kind == "model" else {"drafting": drafting}))
        for kind, drafting in DRAFTING.items()
    }


@pytest.fixture(scope="module")
def alone(bundles: dict[str, Path]) -> list[list[int]]:
    """The texts of ASKED one by one, without drafts, with a linear cache."""
    with LLM(bundles["linear"], threads=1) as llm:
        return [llm.generate(prompt, params_of(asked)).token_ids for prompt, asked in ASKED]


@pytest.fixture(scope="module")
def opened(bundles: dict[str, Path]) -> Iterator[dict[tuple[str, bool], LLM]]:
    with ExitStack() as stack:
        yield {
            # Half of them process every prompt from its start, the others only tokens that are not cached.
            (kind, overlap): stack.enter_context(
                LLM(bundles[kind], device="cpu", threads=1, overlap=overlap, prefix_caching=overlap)
            )
            for kind in DRAFTING
            for overlap in (False, True)
        }


@pytest.fixture
def llm(bundles: dict[str, Path]) -> Iterator[LLM]:
    with LLM(bundles["model"], device="cpu", threads=1) as opened:
        yield opened


def params_of(asked: dict[str, Any]) -> SamplingParams:
    return SamplingParams(temperature=1.0, **asked)


class Traffic:
    """Requests that arrive one by one, each after some tokens or the end of the previous one."""

    def __init__(self, llm: LLM, arrivals: list[tuple[int, int, int | None]]) -> None:
        self._llm = llm
        self._arrivals = arrivals  # index into ASKED, tokens before the next one arrives, tokens before it is cancelled
        self._next = 0
        self._sending = threading.Lock()
        self._over = threading.Semaphore(0)
        self.outputs: dict[int, RequestOutput] = {}

    def run(self) -> dict[int, RequestOutput]:
        self._send(0)
        for _ in self._arrivals:
            assert self._over.acquire(timeout=PATIENCE_S)
        return self.outputs

    def _send(self, number: int) -> None:
        with self._sending:
            if number != self._next or number == len(self._arrivals):
                return
            self._next += 1
        which, before_next, cancelled = self._arrivals[number]
        prompt, asked = ASKED[which]
        heard = [0]
        sent: list[Request] = []

        def listen(item: StreamOutput) -> None:
            heard[0] += len(item.token_ids)
            if heard[0] >= before_next or item.output is not None:
                self._send(number + 1)
            if cancelled is not None and heard[0] >= cancelled and sent:
                self._llm.cancel(sent[0])
            if item.output is not None:
                self.outputs[number] = item.output
                self._over.release()

        sent.append(self._llm.submit(prompt, params_of(asked), listen))
        if not before_next:
            self._send(number + 1)
        if cancelled == 0:
            self._llm.cancel(sent[0])


ARRIVALS = st.lists(
    st.tuples(st.integers(0, len(ASKED) - 1), st.integers(0, 5), st.none() | st.integers(0, 3)), min_size=1, max_size=7
)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", DRAFTING)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=ARRIVALS, chunk=st.integers(1, CHUNK), while_decoding=st.integers(1, CHUNK))
def test_texts_do_not_depend_on_arrival_times_neighbours_or_chunks(
    opened: dict[tuple[str, bool], LLM],
    alone: list[list[int]],
    kind: str,
    overlap: bool,
    arrivals: list[tuple[int, int, int | None]],
    chunk: int,
    while_decoding: int,
) -> None:
    llm = opened[kind, overlap]
    llm.loop.planner.chunk, llm.loop.planner.chunk_while_decoding = chunk, while_decoding
    before = llm.metrics.copy()
    outputs = Traffic(llm, arrivals).run()
    for number, (which, _, cancelled) in enumerate(arrivals):
        output = outputs[number]
        if output.finish_reason == "cancelled":
            assert cancelled is not None
            assert output.token_ids == alone[which][: len(output.token_ids)]
        else:
            assert (output.finish_reason, output.token_ids) == ("length", alone[which]), f"request {number}"
    if all(cancelled is None for *_, cancelled in arrivals):
        counted = llm.metrics.since(before)
        assert counted.prefilled + counted.cached == sum(len(ASKED[which][0]) - 1 for which, *_ in arrivals)
        assert counted.cached == 0 or overlap


def rounds_of(llm: LLM) -> list[Round]:
    """Record the rounds of the target from now on."""
    seen: list[Round] = []
    score = llm.loop.target.score

    def record_round(round_: Round) -> None:
        seen.append(round_)
        score(round_)

    llm.loop.target.score = record_round  # type: ignore[method-assign]
    return seen


def test_prompts_that_arrive_together_are_packed_into_one_round(llm: LLM, alone: list[list[int]]) -> None:
    """One call processes all tokens of four prompts and verifies their first draft windows."""
    rounds = rounds_of(llm)
    with llm.loop.scheduler._changed:  # so that the loop finds all four together
        requests = [1, 2, 2, 3]
        ended = threading.Semaphore(0)
        outputs: dict[int, RequestOutput] = {}

        def listen(number: int, item: StreamOutput) -> None:
            if item.output is not None:
                outputs[number] = item.output
                ended.release()

        for number, which in enumerate(requests):
            prompt, asked = ASKED[which]
            llm.submit(prompt, params_of(asked), lambda item, number=number: listen(number, item))  # type: ignore[misc]
    assert all(ended.acquire(timeout=PATIENCE_S) for _ in requests)
    first = rounds[0]
    assert (first.batch, first.window, list(first.rows)) == (4, 4, [0, 1, 2, 3])
    assert first.prompts.prompts == 4
    assert first.prompts.prompt_tokens + first.window_tokens == 128, "1 + 16 + 16 + 62 of prompts, 4 windows of 5"
    assert all(round_.prompts == NO_PROMPTS for round_ in rounds[1:])
    assert [outputs[number].token_ids for number in range(4)] == [alone[which] for which in requests]
    assert len(rounds) < max(len(tokens) for tokens in alone) + 3


def test_a_long_prompt_is_processed_in_chunks_without_draft_windows(llm: LLM) -> None:
    rounds = rounds_of(llm)
    prompt, asked = ASKED[-1]
    llm.generate(prompt, params_of(asked))
    assert [(round_.batch, round_.prompts.prompt_tokens) for round_ in rounds[:2]] == [(0, 128), (1, 31)]
    assert llm.metrics.prefilled == len(prompt) - 1


def test_an_option_limits_prompt_tokens_while_requests_decode(bundles: dict[str, Path], alone: list[list[int]]) -> None:
    with LLM(bundles["model"], device="cpu", threads=1, num_draft_tokens=0, prefill_chunk=20) as llm:
        rounds = rounds_of(llm)
        outputs = Traffic(llm, [(0, 1, None), (7, 9, None)]).run()
        packed = [round_ for round_ in rounds if 0 in round_.rows and round_.prompts != NO_PROMPTS]
        assert [output.token_ids for _, output in sorted(outputs.items())] == [alone[0], alone[7]]
        assert len(packed) == 8
        assert max(round_.prompts.prompt_tokens + round_.window_tokens for round_ in packed) <= 32, "20 and padding"


def test_warm_up_runs_prompts_of_every_size_and_leaves_no_trace(llm: LLM, alone: list[list[int]]) -> None:
    rounds = rounds_of(llm)
    llm._loop_thread.prepare(partial(capture, llm.loop))
    assert llm.metrics.prefilled == 0
    assert not llm.loop.target.state.view("length", SLOTS).any()
    ready = {round_.window_tokens + round_.prompts.prompt_tokens for round_ in rounds if round_.prompts != NO_PROMPTS}
    numbers, scored = {round_.prompts.prompts for round_ in rounds}, {round_.window_tokens for round_ in rounds}
    rounds.clear()
    outputs = llm.generate([prompt for prompt, _ in ASKED], [params_of(asked) for _, asked in ASKED])
    llm.generate([1, 2, 3], SamplingParams(max_tokens=1))  # a round with a prompt and without drafts
    assert [output.token_ids for output in outputs] == alone
    assert {
        round_.window_tokens + round_.prompts.prompt_tokens for round_ in rounds if round_.prompts != NO_PROMPTS
    } <= ready
    assert {round_.prompts.prompts for round_ in rounds} <= numbers
    assert {round_.window_tokens for round_ in rounds} <= scored


@pytest.mark.parametrize(
    ("prefill_chunk", "message"),
    [
        (CHUNK + 1, "prefill_chunk: the bundle was built for at most 128 prompt tokens per round, received 129"),
        (0, "prefill_chunk: must be at least 1 prompt token per round, received 0"),
        (True, "prefill_chunk: must be an integer, received True"),
    ],
)
def test_an_invalid_number_of_prompt_tokens_is_rejected(
    bundles: dict[str, Path], prefill_chunk: Any, message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        LLM(bundles["model"], device="cpu", threads=1, prefill_chunk=prefill_chunk)


def test_a_draft_catches_up_on_all_texts_in_one_call(bundles: dict[str, Path], alone: list[list[int]]) -> None:
    """No round drafts with three other requests. After they end, the draft has missed prompts and output."""
    with LLM(bundles["model"], device="cpu", threads=1, num_draft_tokens={1: 4, 3: 0}) as llm:
        outputs = Traffic(llm, [(6, 0, None), (2, 0, None), (3, 2, None), (5, 1, None), (6, 4, None)]).run()
        assert [output.token_ids for _, output in sorted(outputs.items())] == [alone[i] for i in (6, 2, 3, 5, 6)]
        assert llm.metrics.drafted > 0
        assert llm.metrics.rounds > llm.metrics.steps / SLOTS


def test_requests_that_end_with_the_first_token_after_their_prompt_get_no_drafts(llm: LLM) -> None:
    rounds = rounds_of(llm)
    prompt, asked = ASKED[3]
    for most in (1, 2):
        llm.generate(prompt, params_of(asked | {"max_tokens": most}))
    assert [round_.window for round_ in rounds if round_.prompts != NO_PROMPTS] == [0, 4]


def test_first_tokens_leave_the_device_before_the_draft_reads_their_prompts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for owner, name in ((llm.loop._stages, "_fetch_tokens"), (llm.loop.drafter, "_run_prompts")):
        work = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, name=name, work=work: (done.append(name), work(*args))[1])
    llm.generate([7] * 100, SamplingParams(max_tokens=9, ignore_eos=True))
    assert done[:2] == ["_fetch_tokens", "_run_prompts"]
