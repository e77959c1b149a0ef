"""Every parameter of a request has its effect through the Python API.

A bias of 100 makes the model say what a test wants it to say, so that only the parameter decides what becomes of it.
"""

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors

from tandemrt import LLM, RequestOutput, SamplingParams, StreamOutput, StructuredOutputs
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadRequest, Closed, QueueFull
from tandemrt.export.bundle.build import build
from tandemrt.runtime.cli.calibrate import SCALES, acceptance_lengths
from tandemrt.runtime.grammars.compiler import GrammarCompiler
from tandemrt.runtime.grammars.llguidance_matcher import LLGuidanceGrammar, LLGuidanceMatcher
from tandemrt.runtime.llm import host_costs
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.workers.clients import Client
from tests.makers import tiny_checkpoint, write_recipe
from tests.waiting import PATIENCE_S, eventually
from tools.clients.listener import Listener

PAD, STOP, CALL = 262, 263, 266  # <|endoftext|>, <|im_end|>, <tool_call>
A, B = 64, 65  # the tokens of "a" and "b"
NO_REASONING = {"thinking_token_budget": 0}


@pytest.fixture(scope="module")
def opened(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1) as llm:
        assert [llm.tokenizer.token_to_id(token) for token in "ab"] == [A, B]
        yield llm


@pytest.fixture
def ask(opened: LLM) -> Callable[..., RequestOutput]:
    def ask(prompt: Any, **params: Any) -> RequestOutput:
        return opened.generate(prompt, SamplingParams(**({"temperature": 0.0} | params)))

    return ask


def test_a_text_is_tokenized_like_a_prompt(opened: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = processors.TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", STOP)])
    monkeypatch.setattr(opened.tokenizer.backend, "post_processor", begin)
    assert opened.tokenize("ab") == [STOP, A, B]
    assert opened.tokenize("ab", add_special_tokens=False) == [A, B]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_of_its_own_ends_a_request_and_is_named(ask, ignore_eos) -> None:
    output = ask("x", stop_token_ids=[A], logit_bias={A: 100}, ignore_eos=ignore_eos)
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", A, "")


def test_a_stop_token_of_its_own_ends_a_grammar_where_the_text_is_complete(ask) -> None:
    regex = {"regex": "[a-c]{3}[a-c]*"}
    output = ask(
        "x", stop_token_ids=[PAD], logit_bias={PAD: 100}, ignore_eos=True, **NO_REASONING, structured_outputs=regex
    )
    assert (output.finish_reason, output.stop_reason, len(output.text)) == ("stop", PAD, 3)


def test_a_grammar_without_another_text_ends_a_request_that_ignores_stop_tokens(ask) -> None:
    output = ask("x", structured_outputs={"choice": ["ab"]}, ignore_eos=True, **NO_REASONING)
    assert (output.text, output.finish_reason) == ("ab", "stop")


def test_the_state_of_a_grammar_is_freed_with_its_request(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    matchers: list[weakref.ref[LLGuidanceMatcher]] = []

    def matcher(grammar: LLGuidanceGrammar, stop_ids: Any = None) -> LLGuidanceMatcher:
        state = make_matcher(grammar, stop_ids)
        matchers.append(weakref.ref(state))
        return state

    make_matcher = LLGuidanceGrammar.matcher
    monkeypatch.setattr(LLGuidanceGrammar, "matcher", matcher)
    gc.disable()  # it does not know how much memory the library's objects have
    try:
        for choices in (["ab"], ["cd", "ef"]):
            ask("x", n=len(choices), structured_outputs={"choice": choices}, **NO_REASONING)
        ask("y", max_tokens=1)  # the loop keeps the last round until the next one
        assert len(matchers) == 3
        assert eventually(lambda: not any(matcher() for matcher in matchers))
    finally:
        gc.enable()


def test_stop_tokens_are_forbidden_below_min_tokens(ask) -> None:
    output = ask("x", logit_bias={STOP: 100}, min_tokens=5, max_tokens=20)
    assert (output.finish_reason, len(output.token_ids)) == ("stop", 6)
    assert output.token_ids.index(STOP) == 5


@pytest.mark.parametrize(("include", "text"), [(True, "aab"), (False, "aa")])
def test_a_stop_string_is_part_of_the_text_if_it_is_asked_for(ask, include, text) -> None:
    regex = {"regex": "aabc"}
    output = ask("x", stop=["b"], include_stop_str_in_output=include, **NO_REASONING, structured_outputs=regex)
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", "b")


def test_an_implicit_end_of_the_recipe_ends_reasoning_and_nothing_is_forced(ask) -> None:
    output = ask("x <think>", logit_bias={CALL: 100}, thinking_token_budget=3, max_tokens=10)
    assert (output.reasoning, output.forced_ends) == ("", 0)
    assert output.token_ids[0] == CALL


@pytest.mark.parametrize(("max_tokens", "forced"), [(3, 1), (5, 1), (20, 1)])
def test_an_output_ends_at_max_tokens_inside_a_forced_end_as_well(ask, max_tokens, forced) -> None:
    output = ask("x <think>", thinking_token_budget=2, max_tokens=max_tokens, ignore_eos=True)
    assert (output.finish_reason, len(output.token_ids)) == ("length", max_tokens)
    assert output.forced_ends == forced


def test_a_window_of_0_drafts_nothing(ask, opened: LLM) -> None:
    before = opened.metrics.copy()
    record = ask("x", num_draft_tokens=0, max_tokens=10, ignore_eos=True).speculation
    assert (record.num_draft_tokens, record.num_spec_steps, record.mean_acceptance_length) == (0, 0, 1.0)
    assert opened.metrics.since(before).drafted == 0


def test_an_output_may_fill_the_engines_length_to_the_last_token_and_no_further(ask) -> None:
    assert len(ask([A] * 50, max_tokens=46, ignore_eos=True).token_ids) == 46
    with pytest.raises(BadRequest, match=r"max_tokens: .* ask for at most 46"):
        ask([A] * 50, max_tokens=47)


@pytest.mark.parametrize("narrow", [{"min_p": 1.0}, {"top_n_sigma": 1e-9}], ids=str)
def test_the_narrowest_filter_leaves_the_most_probable_token(ask, narrow: dict[str, float]) -> None:
    greedy = ask("the x", max_tokens=12, ignore_eos=True).token_ids
    assert ask("the x", temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, **narrow).token_ids == greedy
    assert len(set(greedy)) > 1


def test_many_biases_are_as_good_as_one(ask) -> None:
    few = ask("x", logit_bias={B: 100}, max_tokens=9, ignore_eos=True)
    many = ask("x", logit_bias={token: -50 for token in range(200) if token != B} | {B: 100}, max_tokens=9)
    assert (many.finish_reason, many.token_ids) == ("length", [B] * 9)
    assert few.token_ids == many.token_ids


def test_a_text_that_was_cut_off_is_not_held_to_its_schema(ask) -> None:
    schema = StructuredOutputs(json={"type": "array", "contains": {"const": 1}}, validate_output=True)
    assert ask("x", structured_outputs=schema, max_tokens=1, ignore_eos=True).finish_reason == "length"


def test_every_seed_of_64_bits_repeats_itself_and_is_reported(ask) -> None:
    texts = {}
    for seed in (0, 2**63 - 1, 2**63, 2**64 - 1, -1):
        output = ask("x", temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True)
        assert output.seed == seed % 2**64
        texts[seed] = output.token_ids
    assert texts[-1] == texts.pop(2**64 - 1)
    assert len({tuple(tokens) for tokens in texts.values()}) == 4


def test_control_tokens_never_appear_in_the_text(ask) -> None:
    output = ask("x", logit_bias={CALL: 100}, max_tokens=3, ignore_eos=True)
    assert (output.token_ids, output.text) == ([CALL] * 3, "")


def test_the_prefill_chunk_is_that_of_a_round_and_not_of_each_slot(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        step, prefill = llm.loop.step, llm.loop.target.prefill
        prefilled: list[int] = []  # tokens by step

        def counted_step() -> None:
            prefilled.append(0)
            step()

        def counted_prefill(slot: int, tokens: torch.Tensor) -> None:
            prefilled[-1] += tokens.numel()
            prefill(slot, tokens)

        llm.loop.step = counted_step  # type: ignore[method-assign]
        llm.loop.target.prefill = counted_prefill  # type: ignore[method-assign]
        llm.generate([[A] * 60, [B] * 60, [A] * 40], SamplingParams(max_tokens=3, ignore_eos=True))
        assert sum(prefilled) == 59 + 59 + 39
        assert max(prefilled) == llm.bundle.limits.prefill_chunk


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and draft are one model in which every id has a text, so no drafted token is masked."""
    folder = tmp_path_factory.mktemp("twins")
    model = tiny_checkpoint(folder / "model", vocab=267, seed=1)
    return build(Recipe.load(write_recipe(folder / "twins.toml", target=model, draft=model)), folder / "bundle").folder


@pytest.mark.parametrize("length", [1, 2, 17, 40])
def test_a_draft_that_is_the_target_is_always_right(twins: Path, length: int) -> None:
    """From the first output token on, for any number of prompt chunks: both sample with the same noise."""
    with LLM(twins, threads=1, adaptive_draft_tokens=False) as llm:
        prompt = [(7 * i) % 200 for i in range(length)]
        params = [
            SamplingParams(temperature=temperature, seed=1, max_tokens=20, ignore_eos=True)
            for temperature in (0.0, 0.7, 1.0, 2.0)
        ]
        outputs = llm.generate([prompt] * 4, params)
        metrics = llm.metrics
    assert [output.speculation.acceptance_histogram for output in outputs] == [[0, 0, 0, 0, 4]] * 4
    assert (metrics.drafted, metrics.evaluated, metrics.constraint_rejected_drafts, metrics.steps) == (64, 64, 0, 16)
    assert (metrics.emitted, metrics.kept, metrics.accepted) == (80, 80, [16, 16, 16, 16])


def test_a_draft_that_is_the_target_is_best_left_at_its_temperature(twins: Path) -> None:
    prompts = [[(7 * i) % 200 for i in range(length)] for length in (5, 9)]
    with LLM(twins, threads=1, adaptive_draft_tokens=False) as llm:
        asked = {each: SamplingParams(temperature=each, max_tokens=11, ignore_eos=True) for each in (0.7, 1.0)}
        lengths = acceptance_lengths(llm, prompts, asked, constraints=[None, None])
    assert list(lengths) == list(SCALES)
    assert lengths[1.0] == [5.0, 5.0], "all of the window and one more"
    assert all(sum(lengths_at_scale) < 10 for scale, lengths_at_scale in lengths.items() if scale != 1)


@pytest.mark.parametrize("which", ["tiny_bundle", "ngram_bundle"])
def test_a_slot_keeps_nothing_of_its_previous_request(which: str, request: pytest.FixtureRequest) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    bundle = request.getfixturevalue(which)
    with LLM(bundle, threads=1, adaptive_draft_tokens=False) as llm:
        fresh = llm.generate("the last one", params)
    with LLM(bundle, threads=1, adaptive_draft_tokens=False) as llm:
        for before in ("the last one and the", [A, B] * 30):
            llm.generate(before, SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True))
        again = llm.generate("the last one", params)
    assert again.token_ids == fresh.token_ids
    assert again.speculation == fresh.speculation


def test_a_draft_that_lags_catches_up_from_where_its_own_request_stood_and_not_the_one_before_it(twins: Path) -> None:
    """The first request never drafts, and leaves with a long text; the next one drafts once it is alone."""
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in (60, 10)]
    with LLM(twins, threads=1, num_draft_tokens={1: 4, 2: 0}) as llm:
        llm.generate([A] * 80, params[1].model_copy(update={"num_draft_tokens": 0}))
        output, _ = llm.generate(["the", "other"], params)
    assert output.speculation.num_spec_steps > 4
    assert sum(output.speculation.acceptance_histogram[:4]) <= 1, "all accepted, but for what the end cuts off"


def test_where_nothing_is_found_to_draft_nothing_counts_as_drafted(
    ngram_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_costs, "_ROW", 0.0)  # copies of one request are not cut for the other
    with LLM(ngram_bundle, threads=1) as llm:
        output = llm.generate([1, 2, 3, 4, 5], SamplingParams(max_tokens=2, ignore_eos=True))
        assert (llm.metrics.drafted, llm.metrics.evaluated, llm.metrics.steps) == (0, 0, 0)
        params = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
        together = llm.generate([list(range(1, 31)), [7, 8, 9] * 10], params)
        assert llm.metrics.drafted == together[1].speculation.num_draft_tokens
    assert output.speculation.num_draft_tokens == together[0].speculation.num_draft_tokens == 0
    assert together[1].speculation.num_draft_tokens > 0, "its rounds have a window, and so the other's have"


def test_reasoning_that_ends_between_two_rounds_ends_inside_of_none(tiny_bundle: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=1, thinking_token_budget=5, max_tokens=30, ignore_eos=True)
    with LLM(tiny_bundle, threads=1, num_draft_tokens=0) as llm:
        assert llm.generate("x <think>", params).forced_ends == 1
        assert llm.metrics.reasoning_ends_mid_round == 0
    with LLM(tiny_bundle, threads=1) as llm:
        llm.generate("x", params)
        assert llm.metrics.reasoning_ends_mid_round == 0, "an answer alone has no boundary"


class Compiler:
    """Grammars that are compiled when a test says so."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        real, self.begun, self.go = GrammarCompiler.compile, threading.Event(), threading.Event()

        def wait(compiler: GrammarCompiler, *args: Any, **options: Any) -> Any:
            self.begun.set()
            self.go.wait(2 * PATIENCE_S)  # longer than any test waits for what should come before
            return real(compiler, *args, **options)

        patched.setattr(GrammarCompiler, "compile", wait)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    slow_compiler = Compiler(monkeypatch)
    yield slow_compiler
    slow_compiler.go.set()


def test_a_grammar_has_as_much_time_as_the_runtime_gives(tiny_bundle: Path, compiler: Compiler) -> None:
    with LLM(tiny_bundle, threads=1, grammar_timeout_s=0.2) as llm:
        with pytest.raises(BadRequest, match=r"compiling took longer than 0\.2 s"):
            llm.generate("x", SamplingParams(structured_outputs={"regex": "a"}))  # type: ignore[arg-type]
        compiler.go.set()


def test_a_request_is_cancelled_while_its_grammar_compiles(tiny_bundle: Path, compiler: Compiler) -> None:
    with LLM(tiny_bundle, threads=1, grammar_timeout_s=3600) as llm:
        heard: list[StreamOutput] = []
        ended = threading.Event()

        def listen(item: StreamOutput) -> None:
            heard.append(item)
            ended.set()

        shape = StructuredOutputs(regex="a")
        request = llm.submit("x", SamplingParams(structured_outputs=shape), listen)
        assert compiler.begun.wait(PATIENCE_S)
        llm.generate("y", SamplingParams(max_tokens=2, ignore_eos=True))
        time.sleep(0.1)  # the loop has nothing to do and falls asleep: nothing but the cancellation wakes it
        llm.cancel(request)
        assert ended.wait(PATIENCE_S)
        assert not compiler.go.is_set()
        assert [item.finish_reason for item in heard] == ["cancelled"]
        compiler.go.set()


def test_refused_requests_start_no_compilation(tiny_bundle: Path, compiler: Compiler) -> None:
    """A thousand requests, each with a grammar and a name of its own, come to a full queue; then one that fits."""
    with LLM(tiny_bundle, threads=1, queue_limit=2, grammar_timeout_s=3600) as llm:
        grammars = llm._admission._grammar_library()

        def ask(number: int) -> Request:
            params = SamplingParams(structured_outputs=StructuredOutputs(regex=f"a{number}"), max_tokens=2)
            return llm.submit("x", params, lambda _: None, client=Client("address", str(number)))

        admitted, refused = [], 0
        for number in range(1000):
            try:
                admitted.append(ask(number))
            except QueueFull:
                refused += 1
        assert refused >= 990
        assert len(grammars._waiting) <= len(admitted) <= 10
        for request in admitted:
            llm.cancel(request)
        assert eventually(lambda: grammars.waiting == 0 and llm.waiting == 0)
        assert len(grammars._waiting) <= 2, "the ones that have begun"
        compiler.go.set()
        params = SamplingParams(structured_outputs=StructuredOutputs(regex="b"), **NO_REASONING)
        assert llm.generate("x", params).text == "b"


def test_a_stream_cancelled_while_it_is_admitted_starts_no_compilation(
    tiny_bundle: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        admit, admitting, go = llm._admission.admit, threading.Event(), threading.Event()
        admitted = threading.Event()

        def slowly(*arguments: Any, **named: Any) -> Any:
            admitting.set()
            go.wait(PATIENCE_S)
            try:
                return admit(*arguments, **named)
            finally:
                admitted.set()

        monkeypatch.setattr(llm._admission, "admit", slowly)

        async def main() -> None:
            params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
            stream = asyncio.create_task(anext(llm.stream("x", params)))
            await asyncio.to_thread(admitting.wait, PATIENCE_S)
            stream.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stream
            go.set()

        asyncio.run(main())
        assert admitted.wait(PATIENCE_S)
        assert len(llm._admission._grammar_library()._waiting) == llm.waiting == 0
        assert not compiler.begun.is_set()


def test_closing_answers_every_request_and_ends_the_loop(tiny_bundle: Path) -> None:
    listeners = [Listener() for _ in range(6)]  # two more than slots
    with LLM(tiny_bundle, threads=1) as llm:

        def first(item: StreamOutput) -> None:
            begun.set()
            assert eventually(lambda: llm.closed)  # no request ends before
            listeners[0](item)

        begun = threading.Event()
        for listen in (first, *listeners[1:]):
            llm.submit([A], SamplingParams(max_tokens=80, ignore_eos=True), listen)
        assert begun.wait(PATIENCE_S)
    for listener in listeners:
        assert listener.wait(PATIENCE_S)
        assert listener.output is not None
        assert listener.output.finish_reason == "cancelled"
    assert llm._loop_thread._thread is not None
    assert not llm._loop_thread._thread.is_alive()
    for refused in (lambda: llm.submit([A], SamplingParams(), listeners[0]), lambda: llm.generate([A])):
        with pytest.raises(Closed, match="this runtime was closed; open the bundle again"):
            refused()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt", ["one", ["one", "two"], ["one", "two", "three"]])
def test_an_interrupt_leaves_no_request_running(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, prompt: str | list[str], n: int
) -> None:
    real, here = Future.result, threading.current_thread()

    def result(future: Future[Any], timeout: float | None = None) -> Any:
        if threading.current_thread() is here:
            raise KeyboardInterrupt
        return real(future, timeout)

    with LLM(tiny_bundle, threads=1) as llm:
        score, released = llm.loop.target.score, threading.Event()

        def wait(round_: Round) -> None:
            released.wait(PATIENCE_S)
            score(round_)

        llm.loop.target.score = wait  # type: ignore[method-assign]
        monkeypatch.setattr(Future, "result", result)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt, SamplingParams(ignore_eos=True, n=n))
        released.set()
        count = n if isinstance(prompt, str) else n * len(prompt)
        assert eventually(lambda: llm.metrics.finished == {"cancelled": count})


def test_a_thread_that_computes_keeps_the_loop_waiting_for_a_fraction_of_a_round(opened: LLM) -> None:
    assert opened.generate("a", SamplingParams(max_tokens=1)).token_ids
    assert sys.getswitchinterval() <= 0.0005
