"""Prompts ride along with the windows of a round, several in one call: every text is the one it has alone.

The executor that serves a GPU runs the steps of a paged bundle on a CPU. Models are random, so a token that was left
out, doubled or put in a wrong place anywhere shows in the text.
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
from tandemrt.engines.calls import NO_PROMPTS
from tandemrt.engines.errors import BadRequest
from tandemrt.engines.recipe import Recipe
from tandemrt.export.build import build
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.round.capture import capture
from tandemrt.runtime.round.round import Round
from tests.engine.test_paged_rounds import PAGED
from tests.makers import tiny_checkpoint, write_recipe
from tests.waiting import PATIENCE_S

CHUNK, LENGTH, SLOTS = 128, 160, 4
DRAFTING = {"model": "", "ngram": 'kind = "ngram"\nwindow = 4\nngram_min = 1', "none": 'kind = "none"'}
# Prompts of 1 token, around a block of 64 and up to what the engine's length leaves: tokens and output tokens.
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
    """What each of ASKED gets one by one, without drafts, over a linear cache."""
    with LLM(bundles["linear"], threads=1) as llm:
        return [llm.generate(prompt, params_of(asked)).token_ids for prompt, asked in ASKED]


@pytest.fixture(scope="module")
def opened(bundles: dict[str, Path]) -> Iterator[dict[tuple[str, bool], LLM]]:
    with ExitStack() as stack:
        yield {
            # Half of them read every prompt from its beginning, the others what they do not know of it.
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
    """Requests that come one by one, each once the one before it has had some tokens or has ended."""

    def __init__(self, llm: LLM, arrivals: list[tuple[int, int, int | None]]) -> None:
        self._llm = llm
        self._arrivals = arrivals  # which of ASKED, tokens of it before the next comes, tokens before it is cancelled
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
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=ARRIVALS, chunk=st.integers(1, CHUNK), beside=st.integers(1, CHUNK))
def test_whoever_comes_when_beside_whom_and_in_whatever_parts_gets_the_text_it_has_alone(
    opened: dict[tuple[str, bool], LLM],
    alone: list[list[int]],
    kind: str,
    overlap: bool,
    arrivals: list[tuple[int, int, int | None]],
    chunk: int,
    beside: int,
) -> None:
    llm = opened[kind, overlap]
    llm.loop.prompts.chunk, llm.loop.prompts.chunk_beside = chunk, beside
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
    """The rounds that the target is asked for from now on."""
    seen: list[Round] = []
    score = llm.loop.tandem.score

    def noted(this: Round) -> None:
        seen.append(this)
        score(this)

    llm.loop.tandem.score = noted  # type: ignore[method-assign]
    return seen


def test_prompts_that_come_together_are_read_in_together_and_take_part_at_once(
    llm: LLM, alone: list[list[int]]
) -> None:
    """All tokens of four prompts in one call, and their first windows, with drafts, in that same call."""
    rounds = rounds_of(llm)
    with llm.loop.scheduler._changed:  # so that the loop finds all four
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
    assert first.prompts.prompt_tokens + first.windows == 128, "1 + 16 + 16 + 62 tokens of prompts and 4 windows of 5"
    assert all(this.prompts == NO_PROMPTS for this in rounds[1:])
    assert [outputs[number].token_ids for number in range(4)] == [alone[which] for which in requests]
    assert len(rounds) < max(len(tokens) for tokens in alone) + 3


def test_a_prompt_longer_than_a_round_takes_is_read_in_while_nobody_decodes_without_windows(llm: LLM) -> None:
    rounds = rounds_of(llm)
    prompt, asked = ASKED[-1]
    llm.generate(prompt, params_of(asked))
    assert [(this.batch, this.prompts.prompt_tokens) for this in rounds[:2]] == [(0, 128), (1, 59)]
    assert llm.metrics.prefilled == len(prompt) - 1


def test_fewer_prompt_tokens_go_in_while_others_decode_if_so_opened(
    bundles: dict[str, Path], alone: list[list[int]]
) -> None:
    with LLM(bundles["model"], device="cpu", threads=1, window=0, prefill_chunk=20) as llm:
        rounds = rounds_of(llm)
        outputs = Traffic(llm, [(0, 1, None), (7, 9, None)]).run()
        beside = [this for this in rounds if 0 in this.rows and this.prompts != NO_PROMPTS]
        assert [output.token_ids for _, output in sorted(outputs.items())] == [alone[0], alone[7]]
        assert len(beside) == 8
        assert max(this.prompts.prompt_tokens + this.windows for this in beside) <= 32, "20 and padding"


def test_prompts_that_are_run_when_a_bundle_opens_have_every_size_that_comes_later_and_leave_no_trace(
    llm: LLM, alone: list[list[int]]
) -> None:
    rounds = rounds_of(llm)
    llm._worker.prepare(partial(capture, llm.loop))
    assert llm.metrics.prefilled == 0
    assert not llm.loop.tandem.state.view("length", SLOTS).any()
    ready = {this.windows + this.prompts.prompt_tokens for this in rounds if this.prompts != NO_PROMPTS}
    numbers = {this.prompts.prompts for this in rounds}
    rounds.clear()
    found = llm.generate([prompt for prompt, _ in ASKED], [params_of(asked) for _, asked in ASKED])
    assert [output.token_ids for output in found] == alone
    assert {this.windows + this.prompts.prompt_tokens for this in rounds if this.prompts != NO_PROMPTS} <= ready
    assert {this.prompts.prompts for this in rounds} <= numbers


@pytest.mark.parametrize(
    ("prefill_chunk", "message"),
    [
        (CHUNK + 1, "prefill_chunk: the bundle was built for at most 128 prompt tokens per round, received 129"),
        (0, "prefill_chunk: at least one prompt token must go in per round, received 0"),
        (True, "prefill_chunk: must be an integer, received True"),
    ],
)
def test_a_number_of_prompt_tokens_that_makes_no_sense_is_refused(
    bundles: dict[str, Path], prefill_chunk: Any, message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        LLM(bundles["model"], device="cpu", threads=1, prefill_chunk=prefill_chunk)


def test_a_draft_that_was_not_asked_for_a_while_is_fed_what_it_missed_of_all_texts_at_once(
    bundles: dict[str, Path], alone: list[list[int]]
) -> None:
    """Beside three others nobody drafts; once they have left, the draft has missed prompts and output."""
    with LLM(bundles["model"], device="cpu", threads=1, window={1: 4, 3: 0}) as llm:
        outputs = Traffic(llm, [(6, 0, None), (2, 0, None), (3, 2, None), (5, 1, None), (6, 4, None)]).run()
        assert [output.token_ids for _, output in sorted(outputs.items())] == [alone[i] for i in (6, 2, 3, 5, 6)]
        assert llm.metrics.drafted > 0
        assert llm.metrics.rounds > llm.metrics.steps / SLOTS
