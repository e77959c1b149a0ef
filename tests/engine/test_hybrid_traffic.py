"""Hybrid models under random traffic: each token has the bits that it has alone, whatever happens around it.

Requests share beginnings, so that prompts continue from cached prefixes; they have any draft lengths and chunks; some
are cancelled, and others take their slots.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.request import Request, StreamOutput
from tests.makers import tiny_checkpoint, tiny_hybrid, write_recipe

LENGTH, TOKENS = 260, 8
TEXT = [(7 * i * i + 3 * i) % 199 for i in range(200)]
DRAFTS = ("ngram", "hybrid", "attention")


class Asked(NamedTuple):
    """A request: its prompt is ``shared`` tokens of TEXT and ``own`` others, which depend on ``seed``."""

    shared: int
    own: int
    seed: int

    @property
    def prompt(self) -> list[int]:
        return TEXT[: self.shared] + [(11 * i + 5 * self.seed) % 199 for i in range(self.own)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LLM]]:
    """LLMs by draft, and "alone", which drafts nothing and caches no prefixes."""
    folder = tmp_path_factory.mktemp("traffic")
    target = tiny_hybrid(folder / "target", seed=1)
    drafts: dict[str, dict[str, Any]] = {
        "ngram": {"drafting": 'kind = "ngram"\nnum_draft_tokens = 5\nngram_min = 1'},
        "hybrid": {"draft": tiny_hybrid(folder / "draft", layers=3, seed=1), "window": 5},
        "attention": {"draft": tiny_checkpoint(folder / "attention", layers=1, seed=1, max_length=512), "window": 5},
    }

    def built(name: str) -> Path:
        limits = {"batch": 3, "length": LENGTH, "prefill_chunk": 128}
        recipe = write_recipe(folder / f"{name}.toml", target=target, **drafts[name], **limits)
        return build(Recipe.load(recipe), folder / f"{name}-bundle").folder

    with ExitStack() as stack:
        llms = {name: stack.enter_context(LLM(built(name), threads=1)) for name in DRAFTS}
        alone = LLM(folder / "ngram-bundle", threads=1, prefix_caching=False, num_draft_tokens=0)
        yield llms | {"alone": stack.enter_context(alone)}


def params(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=TOKENS, ignore_eos=True, logprobs=4, logprobs_mode="raw", **more)


ALONE: dict[Asked, Any] = {}


def alone(llm: LLM, asked: Asked) -> Any:
    """Return the logprobs of a request that runs alone."""
    if asked not in ALONE:
        ALONE[asked] = llm.generate(asked.prompt, params(asked.seed)).logprobs
    return ALONE[asked]


class Heard:
    """The logprobs of a stream, which is cancelled after ``cancel_after`` tokens."""

    def __init__(self, cancel_after: int | None) -> None:
        self.request: Request | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.ended: Future[None] = Future()
        self._cancel_after = TOKENS if cancel_after is None else cancel_after

    def listen(self, item: StreamOutput) -> None:
        self.logprobs += item.logprobs or ()
        if len(self.logprobs) >= self._cancel_after and self.request is not None:
            self.request.cancel()
        if item.output is not None:
            self.ended.set_result(None)


# Beginnings that end at blocks of 64 tokens, within them, and one token before and after.
asked = st.builds(
    Asked, st.sampled_from([0, 1, 63, 64, 65, 100, 127, 128, 129, 192]), st.sampled_from([1, 2, 20]), st.integers(0, 1)
)
requests = st.tuples(asked, st.integers(0, 5), st.none() | st.integers(1, TOKENS - 1))  # draft length, cancelled after


@pytest.mark.parametrize("draft", DRAFTS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.lists(requests, min_size=1, max_size=8), chunk=st.integers(1, 128), while_decoding=st.integers(1, 128))
def test_logits_have_the_bits_of_a_request_alone(
    opened: dict[str, LLM], draft: str, sent: list[tuple[Asked, int, int | None]], chunk: int, while_decoding: int
) -> None:
    llm = opened[draft]
    llm.loop.planner.chunk, llm.loop.planner.chunk_while_decoding = chunk, while_decoding
    found = [Heard(cancel_after) for *_, cancel_after in sent]
    for (each, window, _), heard in zip(sent, found, strict=True):
        heard.request = llm.submit(each.prompt, params(each.seed, num_draft_tokens=window), heard.listen)
    for heard in found:
        heard.ended.result(60)
    for (each, _, cancel_after), heard in zip(sent, found, strict=True):
        expected = alone(opened["alone"], each)
        assert heard.logprobs == expected[: len(heard.logprobs)]
        assert cancel_after is not None or len(heard.logprobs) == TOKENS


def test_prompts_continue_from_cached_prefixes(opened: dict[str, LLM]) -> None:
    llm = opened["hybrid"]
    llm.loop.planner.chunk = 128
    texts = []
    for own in range(3):
        before = llm.metrics.cached
        each = Asked(192, 20, own)
        texts.append(llm.generate(each.prompt, params(own)).logprobs)
        assert texts[-1] == alone(opened["alone"], each)
        assert own == 0 or llm.metrics.cached - before == 192


def test_several_outputs_share_their_prompt(opened: dict[str, LLM]) -> None:
    each = Asked(100, 20, 7)
    several = opened["hybrid"].generate(each.prompt, params(7, n=3)).outputs
    expected = opened["alone"].generate(each.prompt, params(7, n=3)).outputs
    assert [output.logprobs for output in several] == [output.logprobs for output in expected]
