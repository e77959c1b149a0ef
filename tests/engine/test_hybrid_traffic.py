"""Hybrid models under random traffic: each token has the bits that it has alone, whatever happens around it.

Requests share beginnings, so that prompts continue from cached prefixes; they have any draft lengths and chunks; some
are cancelled or preempted, and others take their slots. `make test-hybrids` sends 500 requests to all pairs of a target
and a draft.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.request import Request, StreamOutput
from tests.engine.decoding import make_checkpoint
from tests.engine.draft_kinds import DFLASH, DSPARK, EAGLE3, MASK, PEAGLE
from tests.engine.test_hybrid_heads import add_mtp
from tests.engine.test_paged_rounds import PAGED
from tests.makers import VOCAB, on_a_gpu, tiny_checkpoint, tiny_hybrid, tiny_tokenizer, write_recipe

LENGTH, TOKENS, WINDOW = 260, 8, 4
TEXT = [(7 * i * i + 3 * i) % 199 for i in range(200)]
TARGETS = ("delta net", "mamba", "convolution")
# Further families of a long run (tests/families/cases.py), with a draft that is often wrong and one that is
# right.
FURTHER = ("falcon_h1", "kimi_linear", "lfm3", "nemotron_h", "olmo_hybrid", "qwen3_5_moe")
DRAFTS = ("ngram", "hybrid", "attention", "pard", "eagle3", "peagle", "dflash", "dspark")
# In every run: each target, and a draft without a model, a hybrid one, one with a cache of its own, and a head.
# The operators of a GPU's paged cache run on a CPU here.
PAIRS = [("delta net", "ngram"), ("mamba", "hybrid"), ("delta net", "pard"), ("convolution", "eagle3")]
PAIRS += [("paged delta net", "hybrid")]
ALL_PAIRS = [
    ("delta net", "mtp"),
    ("paged delta net", "mtp"),
    *((f"paged {target}", draft) for target in TARGETS for draft in ("ngram", "hybrid", "attention")),
    *((target, draft) for target in TARGETS for draft in DRAFTS),
    *((target, draft) for target in FURTHER for draft in ("ngram", "itself")),
    *(("ranked delta net", draft) for draft in (*DRAFTS, "mtp")),
    *(("ranked mamba", draft) for draft in ("ngram", "hybrid")),
]
# Over two processes: "mamba" has one group of keys, queries and norms, which both have.
RANKED = {
    "ranked delta net": on_a_gpu("delta net"),
    "ranked mamba": on_a_gpu("mamba")
    | {"hidden": 64, "num_attention_heads": 2, "mamba_n_heads": 8, "mamba_n_groups": 1},
}
_OF_TEXT = {"vocab_size": VOCAB, "eos_token_id": 263, "max_position_embeddings": 512}
REQUESTS = int(os.environ.get("HYBRID_REQUESTS", "0"))  # of a long run, over all pairs


class Asked(NamedTuple):
    """A request: its prompt is ``shared`` tokens of TEXT and ``own`` others, which depend on ``seed``."""

    shared: int
    own: int
    seed: int

    @property
    def prompt(self) -> list[int]:
        return TEXT[: self.shared] + [(11 * i + 5 * self.seed) % 199 for i in range(self.own)]


class Traffic:
    """The models of a target and a draft, opened when they are needed, and what each request gives alone."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._llms: dict[tuple[str, str], LLM] = {}
        self._silent: dict[str, LLM] = {}  # without drafts and without a prefix cache
        self._alone: dict[tuple[str, Asked], list[TokenLogprobs]] = {}

    def llm(self, target: str, draft: str) -> LLM:
        if (target, draft) not in self._llms:
            bundle = self._built(target, draft)
            self._llms[target, draft] = self._stack.enter_context(LLM(bundle, device="cpu", threads=1))
            if target not in self._silent:
                options: Any = {"prefix_caching": False, "num_draft_tokens": 0}
                self._silent[target] = self._stack.enter_context(LLM(bundle, device="cpu", threads=1, **options))
        return self._llms[target, draft]

    def alone(self, target: str, asked: Asked) -> list[TokenLogprobs]:
        if (target, asked) not in self._alone:
            logprobs = self._silent[target].generate(asked.prompt, params(asked.seed)).logprobs
            assert logprobs is not None
            self._alone[target, asked] = logprobs
        return self._alone[target, asked]

    def several(self, target: str, asked: Asked, n: int) -> list[Any]:
        return [each.logprobs for each in self._silent[target].generate(asked.prompt, params(7, n=n)).outputs]

    def _built(self, target: str, draft: str) -> Path:
        folder = self._folder / f"{target}-{draft}"
        model = hybrid(folder / "target", target)
        limits: dict[str, Any] = {"batch": 3, "length": LENGTH, "prefill_chunk": 128}
        if target.startswith("paged"):
            limits["backend"] = PAGED
        if target in RANKED:
            limits["backend"] = f"{PAGED}\ntensor_parallel = 2"
        recipe = write_recipe(
            self._folder / f"{target}-{draft}.toml".replace(" ", "-"),
            target=model,
            drafting=drafting(folder, target, draft),
            **limits,
        )
        return build(Recipe.load(recipe), folder / "bundle").folder


def hybrid(folder: Path, kind: str, **sizes: int) -> Path:
    if kind in FURTHER:
        make_checkpoint(kind, tiny_tokenizer(folder), sizes=_OF_TEXT)
        return folder
    name = kind.removeprefix("paged ").removeprefix("ranked ")
    more = RANKED.get(kind, on_a_gpu(name) if name != kind else {})
    return tiny_hybrid(folder, name, seed=1, **sizes, **more)


def drafting(folder: Path, target: str, draft: str) -> str:
    """Write the checkpoint of a draft for the target in ``folder``; return the table of its recipe."""
    if draft == "ngram":
        return f'kind = "ngram"\nnum_draft_tokens = {WINDOW}\nngram_min = 1'
    heads = {"eagle3": EAGLE3, "peagle": PEAGLE, "dflash": DFLASH, "dspark": DSPARK}
    kind, where = draft, folder / "draft"
    if draft == "hybrid":
        kind = "model"
        hybrid(where, target, layers=3)
    elif draft == "attention":
        kind = "model"
        tiny_checkpoint(where, layers=1, seed=1, max_length=512, head_dim=64)
    elif draft == "pard":
        path = tiny_checkpoint(where, layers=2, seed=1, max_length=512, head_dim=64) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pard_token": MASK, "spd_type": "pard"}))
    elif draft == "itself":
        kind, where = "model", folder / "target"
    elif draft == "mtp":
        where = folder / "target"
        add_mtp(where)
    else:
        head: Any = heads[draft]
        layers = {"target_layers": 4} if draft in ("eagle3", "peagle") else {}
        where = replace(head, max_length=512, **layers).save(where)
    return f'kind = "{kind}"\ncheckpoint = "{where}"\nnum_draft_tokens = {WINDOW}'


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traffic]:
    with ExitStack() as stack:
        yield Traffic(tmp_path_factory.mktemp("traffic"), stack)


def params(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=TOKENS, ignore_eos=True, logprobs=4, logprobs_mode="raw", **more)


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
requests = st.tuples(asked, st.integers(0, WINDOW), st.none() | st.integers(1, TOKENS - 1))  # window, cancelled after


@pytest.mark.parametrize(("target", "draft"), ALL_PAIRS if REQUESTS else PAIRS)
@settings(
    max_examples=-(-REQUESTS // len(ALL_PAIRS) // 4) or 2,  # of four requests or more
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # no shrinking, which takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sent=st.lists(requests, min_size=4, max_size=8),
    chunk=st.integers(1, 128),
    while_decoding=st.integers(1, 128),
    short_of_memory=st.sets(st.integers(0, 20), max_size=2),
)
def test_logits_have_the_bits_of_a_request_alone(
    traffic: Traffic,
    target: str,
    draft: str,
    sent: Sequence[tuple[Asked, int, int | None]],
    chunk: int,
    while_decoding: int,
    short_of_memory: set[int],
) -> None:
    llm = traffic.llm(target, draft)
    llm.loop.planner.chunk, llm.loop.planner.chunk_while_decoding = chunk, while_decoding
    listeners = [Heard(cancel_after) for *_, cancel_after in sent]
    grow, llm.loop.slots.grow = llm.loop.slots.grow, failing(llm.loop.slots.grow, short_of_memory)  # type: ignore[method-assign]
    try:
        for (each, window, _), heard in zip(sent, listeners, strict=True):
            heard.request = llm.submit(each.prompt, params(each.seed, num_draft_tokens=window), heard.listen)
        for heard in listeners:
            heard.ended.result(60)
    finally:
        llm.loop.slots.grow = grow  # type: ignore[method-assign]
    for (each, _, cancel_after), heard in zip(sent, listeners, strict=True):
        assert heard.logprobs == traffic.alone(target, each)[: len(heard.logprobs)]
        assert cancel_after is not None or len(heard.logprobs) == TOKENS


def failing(grow: Callable[..., bool], calls: set[int]) -> Callable[..., bool]:
    """Return ``grow`` without memory in the given ``calls``, which preempts the youngest request."""
    number = count()
    return lambda running: next(number) not in calls and grow(running)


@pytest.mark.parametrize("target", ["mamba", "paged delta net"])
def test_prompts_continue_from_cached_prefixes(traffic: Traffic, target: str) -> None:
    llm = traffic.llm(target, "hybrid")
    llm.loop.planner.chunk = 128
    for own in range(3):
        before = llm.metrics.cached
        each = Asked(192, 20, own)
        assert llm.generate(each.prompt, params(own)).logprobs == traffic.alone(target, each)
        assert own == 0 or llm.metrics.cached - before == 192


def test_several_outputs_share_their_prompt(traffic: Traffic) -> None:
    each = Asked(100, 20, 7)
    several = traffic.llm("mamba", "hybrid").generate(each.prompt, params(7, n=3)).outputs
    assert [output.logprobs for output in several] == traffic.several("mamba", each, 3)
