"""Drafts in rounds, kind by kind: what is drafted is what its definition drafts, and it changes no text."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, pairwise
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tandemrt import LLM, RequestOutput, SamplingParams
from tandemrt.engines.bundle.manifest import DIGEST, FILE_NAME, TARGET_IDS, Manifest
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.opening import open_models
from tandemrt.plugins.operators.constants import Purpose, Rule
from tandemrt.plugins.reference.noise import position_noise
from tandemrt.runtime.engine_loop.capture import capture
from tandemrt.runtime.requests.request import StreamOutput
from tandemrt.runtime.requests.round import Round
from tests.conftest import shared_bundle
from tests.eagle3 import Head
from tests.engine.draft_kinds import EAGLE3, KINDS, MASK, SIZES, Drafts, DSparkDrafts, Target, pard, two_known
from tests.engine.drawn_requests import WAYS, check_each_alone, requests
from tests.engine.preempted import preempting
from tests.engine.test_invisible import REQUESTS, open_llm, output_of
from tests.engine.test_paged_rounds import PAGED
from tests.makers import VOCAB, tiny_checkpoint, write_recipe

CACHES = {"linear": 'name = "onnxruntime-cpu"', "paged": PAGED}
DRAWN = "greedy_below = 0.1\ntemperature_scale = 0.5"  # as a recipe says
SHARED = [(7 * i) % 256 for i in range(150)]  # two full blocks and a bit


class Built:
    """The bundles of one kind of draft, built and opened when a test asks for them.

    All processes and files share the bundles: their checkpoints are equal.
    """

    def __init__(
        self, name: str, folder: Path, target: Path, opened: ExitStack, folders: pytest.TempPathFactory
    ) -> None:
        folder.mkdir()
        self.name, self.kind = name, KINDS[name]
        self._folder, self._opened, self._folders = folder, opened, folders
        self._target = folder / "draft" if self.kind.with_target else target
        self.drafts: Drafts = self.kind.save(folder / "draft", reference(target))
        self.known = self.kind.known(folder / "draft")
        self.among = {"logit_bias": dict.fromkeys(self.known, 30.0)} if self.known else {}
        self.bundle, self.llm, self.autoregressive = cache(self._bundle), cache(self._llm), cache(self._autoregressive)

    @property
    def requests(self) -> list[tuple[str, dict[str, Any]]]:
        among = {**self.among, "ignore_eos": True}
        return [
            *REQUESTS[1:9:3],
            ("among two", {"temperature": 0.0, "max_tokens": 30, **among}),
            ("of them " * 20, {"temperature": 0.8, "seed": 3, "max_tokens": 60, **among}),
            ("and of these " * 12, {"temperature": 0.5, "seed": 4, "max_tokens": 60, **among}),
        ]

    def asked(self, **params: Any) -> SamplingParams:
        return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **self.among, **params})

    def _bundle(self, form: str) -> Path:
        def write(folder: Path) -> Path:
            return recipe_file(self.name, folder, self._target, self._folder / "draft", form)

        return shared_bundle(self._folders, f"drafts-{self.name}-{form}", write)

    def _llm(self, form: str) -> LLM:
        """Over a paged cache as a GPU has it; over a linear one, drafts are masked by grammars.

        ``form``: one of CACHES, and optionally "with lookup".
        """
        cache_form, _, lookup = form.partition(" ")
        paged = cache_form == "paged"
        options: Any = {"overlap": True, "cache_tokens": 448} if paged else {"draft_masks": True}
        options |= {"lookup": bool(lookup), "adaptive_draft_tokens": False}
        options |= {"synthetic_rule": True}  # for requests that ask for it
        llm = self._opened.enter_context(open_llm(self.bundle(cache_form), device="cpu", **options))
        if paged:
            llm._loop_thread.prepare(partial(capture, llm.loop))  # as a GPU does
            llm.generate([5], SamplingParams(max_tokens=2))  # a text of one token takes a slot as capturing left it
        return llm

    def _autoregressive(self) -> list[Any]:
        return [output_of(output) for output in answers(self.llm("linear"), self.requests, num_draft_tokens=0)]


def recipe_file(kind: str, folder: Path, target: Path, draft: Path, form: str) -> Path:
    drafting = f'kind = "{kind}"\ncheckpoint = "{draft}"\nnum_draft_tokens = {KINDS[kind].window}\n{DRAWN}'
    path = folder / f"{kind}-{form}.toml"
    return write_recipe(path, target=target, drafting=drafting, backend=CACHES[form], length=256)


def recipe_of(kind: str, folder: Path, target: Path, draft: Path, form: str = "linear") -> Recipe:
    return Recipe.load(recipe_file(kind, folder, target, draft, form))


@cache
def reference(target: Path) -> Target:
    return Target(target)


def answers(llm: LLM, requests: Sequence[tuple[str, dict[str, Any]]], **params: Any) -> list[RequestOutput]:
    return llm.generate([prompt for prompt, _ in requests], [SamplingParams(**asked | params) for _, asked in requests])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    tiny_checkpoint(folder / "target", **SIZES)
    return folder


@pytest.fixture(scope="module")
def all_built(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Built]]:
    target = folder / "target"
    with ExitStack() as opened:
        yield {name: Built(name, folder / name, target, opened, tmp_path_factory) for name in KINDS}


# A dflash2 draft runs as a dspark one, and has a test of its own.
@pytest.fixture(params=[name for name in KINDS if name != "dflash2"])
def built(all_built: dict[str, Built], request: pytest.FixtureRequest) -> Built:
    return all_built[request.param]


class Watched:
    """Keeps what every round drafted for the first slot, and how many tokens it emitted."""

    def __init__(self, built: Built, form: str) -> None:
        self.rounds: list[tuple[list[int], int]] = []
        self.fast_forward_rounds = 0  # rounds with fast-forward tokens only
        self.copied_rounds = 0  # rounds with copies from the text
        self._built, self._paged = built, form.startswith("paged")
        self.llm = built.llm(form)
        self.probs: list[Any] = []  # float32 [window, vocab] that the drafts of each round were sampled from
        self._verified = self.llm.loop.drafter.after_verify

    def __enter__(self) -> "Watched":
        self.llm.loop.drafter.after_verify = self  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        del self.llm.loop.drafter.after_verify

    def __call__(self, round_: Round) -> None:
        buffers = self.llm.loop.target.buffers
        drafted = round_.needs_drafter and 0 not in round_.copied
        drafts = buffers.draft_tokens.view(round_.batch, round_.window)[0].tolist() if drafted else []
        self.copied_rounds += 0 in round_.copied
        self.fast_forward_rounds += round_.only_fast_forward and round_.window > 0
        self.rounds.append((drafts, buffers.count.view(round_.batch)[0].item()))
        if Rule.REJECTION in round_.rules:
            probs = self.llm.loop.drafter._sampler._draft_probs.view(round_.batch, round_.window, VOCAB)  # type: ignore[attr-defined]
            self.probs.append(probs[0].numpy().copy())
        self._verified(round_)

    def drafted(self, max_tokens: int) -> set[int]:
        """Tokens that were drafted within a text of so many. Forgets the rounds."""
        tokens: set[int] = set()
        for drafts, count in self.rounds:
            tokens |= set(drafts[: max(0, max_tokens - 1)])
            max_tokens -= count
        self.rounds = []
        return tokens

    def hold(self, prompt: Sequence[int], text: Sequence[int]) -> int:
        """Every round that drafted did so as the definition; returns how many there were. Forgets them."""
        kind, known, whole, checked = self._built.kind, len(prompt), [*prompt, *text], 0
        least = known if self._paged and kind.late else kind.least
        for drafts, count in self.rounds:
            if drafts and least < known < len(whole):
                assert drafts == self._built.drafts.drafts(whole[:known], len(drafts)), f"after {known} tokens"
                checked += 1
            known += count
        self.rounds = []
        return checked


@pytest.mark.parametrize("form", CACHES)
def test_every_round_drafts_the_tokens_of_the_reference(built: Built, form: str) -> None:
    """After prompts of several chunks, whatever the last round accepted."""
    emitted = set()
    with Watched(built, form) as watched:
        for length in (1, 2, 65):
            prompt = [(11 * i * i + length) % 256 for i in range(length)]
            output = watched.llm.generate(prompt, built.asked())
            emitted |= {count for _, count in watched.rounds}
            assert watched.hold(prompt, output.token_ids) >= 3
    assert len(emitted) >= 2, "drafts are accepted and rejected"


def test_the_tokens_of_a_dflash2_draft_are_chosen_in_sequence(all_built: dict[str, Built]) -> None:
    """As the reference chooses them, without a change of a text."""
    built, emitted = all_built["dflash2"], set()
    with Watched(built, "linear") as watched:
        for prompt in ([7], SHARED[:65]):
            output = watched.llm.generate(prompt, built.asked())
            emitted |= {count for _, count in watched.rounds}
            assert watched.hold(prompt, output.token_ids) >= 3
            assert watched.llm.generate(prompt, built.asked(num_draft_tokens=0)).token_ids == output.token_ids
            watched.rounds = []
    assert len(emitted) >= 2, "drafts are accepted and rejected"


def test_warm_up_leaves_slots_clear(built: Built) -> None:
    """Prompts among it; a text of one token has none that would take its place."""
    llm = built.llm("paged")
    capture(llm.loop)  # once more, without requests
    assert llm.generate([3], built.asked(max_tokens=3)).finish_reason == "length"


@pytest.mark.parametrize("form", CACHES)
def test_rounds_without_drafts_leave_no_gap_in_the_cache(
    built: Built, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = iter([0, 3, 0, 0, 1, 4, 2, 0, 4, *[4] * 30])
    with Watched(built, form) as watched:
        monkeypatch.setattr(watched.llm.loop.draft_windows, "limit", lambda _live: next(windows))
        output = watched.llm.generate([8, *SHARED[:50]], built.asked())
        assert watched.hold([8, *SHARED[:50]], output.token_ids) >= 5


@pytest.mark.parametrize("form", CACHES)
def test_a_short_window_leaves_nothing_of_a_longer_one(
    built: Built, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft is accepted: a round of five tokens, one of two, and so on."""
    windows, prompt = iter([4, 1] * 10), [(13 * i * i) % 256 for i in range(20)]
    with Watched(built, form) as watched:
        monkeypatch.setattr(watched.llm.loop.draft_windows, "limit", lambda _live: next(windows, 4))
        accepting = built.asked(rule="synthetic", synthetic_acceptance_length=1.0 + built.kind.window, max_tokens=30)
        output = watched.llm.generate(prompt, accepting)
        counts = [count for _, count in watched.rounds]
        assert (5, 2) in pairwise(counts)
        assert watched.hold(prompt, output.token_ids) >= 6


@pytest.mark.parametrize("built", ["eagle3", "mtp", "dspark"], indirect=True)
def test_a_drafter_that_stops_early_drafts_the_tokens_of_the_reference(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own probabilities: in every second round after the first token. Its next drafts have no gap."""
    gains, lengths = cycle([0.0, 1.0]), Counter[int]()
    with Watched(built, "linear") as watched:
        windows = watched.llm.loop.draft_windows
        monkeypatch.setattr(windows, "choose", lambda *_, wanted, **__: wanted)
        monkeypatch.setattr(windows, "adaptive", True)
        monkeypatch.setattr(windows, "least_gain", lambda *_: next(gains))
        for length in (2, 65):
            prompt = [(17 * i * i + 3 * length) % 256 for i in range(length)]
            output = watched.llm.generate(prompt, built.asked())
            lengths.update(len(drafts) for drafts, _ in watched.rounds)
            assert watched.hold(prompt, output.token_ids) >= 3
    assert lengths[1] > 2
    assert lengths[built.kind.window] > 2


@pytest.mark.parametrize("form", CACHES)
def test_fast_forward_rounds_leave_no_gap_in_the_cache(
    built: Built, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directly after a prompt, where a draft has little to catch up on; the window is less than the limit."""
    with Watched(built, form) as watched:
        monkeypatch.setattr(watched.llm.loop.draft_windows, "fast_forward", True)
        monkeypatch.setattr(watched.llm.loop.draft_windows, "mask_drafts", False)
        grammar = {"regex": "forced[a-z]{60}"}
        params = built.asked(num_draft_tokens=1, structured_outputs=grammar, max_tokens=14)
        output = watched.llm.generate([9, *SHARED[:50]], params)
        assert watched.fast_forward_rounds
        assert watched.hold([9, *SHARED[:50]], output.token_ids) >= 3


@pytest.mark.parametrize("form", CACHES)
def test_a_cached_prefix_drafts_as_a_prefilled_one(built: Built, form: str) -> None:
    """The contents of a block may depend on tokens after it: then other tokens there make another block."""
    lookahead = built.kind.lookahead
    alike = SHARED[: 128 + max(0, lookahead - 1)]
    with Watched(built, form) as watched:
        for prompt, cached in (
            (SHARED, 0),
            ([*SHARED, 3], 128),
            (SHARED[: 128 + max(1, lookahead)], 64 if lookahead else 128),  # one token must be read for its state
            (SHARED[: 129 + lookahead], 128),
            ([*alike, 255, 1], 64 if lookahead else 128),
            ([*alike, 255, 2], 128),
        ):
            output = watched.llm.generate(prompt, built.asked(max_tokens=7))
            assert output.num_cached_tokens == cached
            assert watched.hold(prompt, output.token_ids) >= 1


def test_drafts_change_no_token(built: Built) -> None:
    speculative = answers(built.llm("linear"), built.requests)
    assert [output_of(output) for output in speculative] == built.autoregressive()
    assert sum(output.speculation.num_accepted_draft_tokens for output in speculative) > 5


def test_the_draft_temperature_comes_from_the_request_or_the_recipe(built: Built) -> None:
    """The recipe names a temperature, below which drafts are greedy, and a scale; a request may say otherwise."""
    drawn: list[float] = []
    cases: list[tuple[float, dict[str, Any], float]] = [
        (0.09, {}, 0),
        (0.11, {}, 0.055),
        (0.09, {"draft_greedy_below": 0.0}, 0.045),
        (0.5, {"draft_greedy_below": 0.6}, 0),
        (0.5, {"draft_sampling": "greedy"}, 0),
        (0.5, {"draft_temperature_scale": 3}, 1.5),
    ]
    llm = built.llm("linear")
    with pytest.MonkeyPatch.context() as patched:
        verified = llm.loop.drafter.after_verify

        def watched(round_: Round) -> None:
            drawn.append(round(llm.loop.target.state.drafting(1)["temperature"].item(), 6))
            verified(round_)

        patched.setattr(llm.loop.drafter, "after_verify", watched)
        for temperature, more, expected in cases:
            llm.generate([5, 6, 7], built.asked(temperature=temperature, seed=1, max_tokens=2, **more))
            assert set(drawn) == {expected}
            drawn.clear()


@pytest.mark.parametrize("form", CACHES)
def test_masked_drafts_are_tokens_that_the_grammar_allows(
    built: Built, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a reduced vocabulary: the grammar allows one of the draft's two tokens."""
    with Watched(built, form) as watched:
        llm = watched.llm
        texts = {token: llm.tokenizer.backend.decode([token]) for token in range(256)}
        letters = [token for token in texts if texts[token] in ("a", "b", *map(texts.get, built.known[:1]))]
        grammar = {"regex": f"[{''.join(re.escape(texts[token]) for token in letters)}]{{60}}"}
        liked = dict.fromkeys(built.known[:1], 5.0)
        params = built.asked(seed=2, max_tokens=12, structured_outputs=grammar, logit_bias=liked)
        monkeypatch.setattr(llm.loop.draft_windows, "fast_forward", False)
        texts, drafted = [], []
        for masked, temperature in ((False, 0.0), (True, 0.0), (False, 1.0), (True, 1.0)):
            monkeypatch.setattr(llm.loop.draft_windows, "mask_drafts", masked)
            texts.append(output_of(llm.generate(SHARED[:9], params.model_copy(update={"temperature": temperature}))))
            drafted.append(watched.drafted(max_tokens=12))
    assert (texts[0], texts[2]) == (texts[1], texts[3])
    assert drafted[1] | drafted[3] <= set(letters), "none that verification would cut"
    assert not drafted[0] | drafted[2] <= set(letters)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_texts_equal_those_of_each_request_alone_for_any_parameters(built: Built, data: st.DataObject) -> None:
    asked, way = data.draw(requests(built.known)), data.draw(WAYS)
    check_each_alone(built.llm("linear"), built.llm("linear"), asked, way, exact=True)


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_texts_do_not_change_when_memory_is_short(built: Built, data: st.DataObject) -> None:
    """Always the same requests: over a paged cache sums have another order, so texts may part at a tie."""
    asked, way = data.draw(requests(built.known)), data.draw(WAYS)
    check_each_alone(built.llm("paged"), built.llm("linear"), asked, way, exact=False)


def test_a_preempted_request_continues_with_the_same_text(built: Built) -> None:
    llm, requests = built.llm("paged"), built.requests[-3:]
    before = llm.metrics.preemptions
    outputs = answers(llm, [*requests[::-1], *requests])
    assert llm.metrics.preemptions > before
    assert [output_of(output) for output in outputs] == [*built.autoregressive()[:-4:-1], *built.autoregressive()[-3:]]


@pytest.mark.parametrize("at", [2, 4])
def test_a_preemption_changes_no_text_or_draft_under_the_rejection_rule(
    built: Built, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Also if it drops the first round with drafts, or a later one: the repeated round drafts the same tokens."""
    llm = built.llm("paged")
    params = built.asked(temperature=1.0, seed=3, max_tokens=20, rule="rejection")
    text = preempting(llm, monkeypatch, [70, 71, 72] * 8, params)
    alone, before = text(0), llm.metrics.preemptions
    assert text(at) == alone
    assert llm.metrics.preemptions == before + 1
    assert sum(map(len, alone[1].values())) > 0


def test_the_rejection_rule_reads_draft_probabilities_and_changes_no_other_request(built: Built) -> None:
    requests, autoregressive = built.requests[-2:], built.autoregressive()[-2:]
    mixed = [(p, params | ({"rule": "rejection"} if i % 2 else {})) for i, (p, params) in enumerate(requests)]
    outputs = answers(built.llm("linear"), mixed)
    assert [output_of(output) for output in outputs[::2]] == autoregressive[::2]
    assert outputs[1::2][-1].speculation.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.known is two_known])
def test_masks_apply_to_drafts_with_a_reduced_vocabulary(all_built: dict[str, Built], kind: str) -> None:
    """Of its two tokens, bytes, a grammar allows one: masked, it drafts that one alone; else the other, too, is cut."""
    llm, known = all_built[kind].llm("linear"), list(all_built[kind].among["logit_bias"])
    cut = {}
    for masked in (True, False):
        llm.loop.draft_windows.mask_drafts = masked
        before = llm.metrics.copy()
        for token in known:
            grammar = {"regex": f"[\\x{token:02x}AB]{{30}}"}
            llm.generate("of two", SamplingParams(structured_outputs=grammar, max_tokens=40, temperature=1.0, seed=1))
        cut[masked] = llm.metrics.since(before).constraint_rejected_drafts
    llm.loop.draft_windows.mask_drafts = True
    assert cut[True] == 0 < cut[False]


def test_target_ids_must_match_the_manifest(all_built: dict[str, Built]) -> None:
    said = json.loads((all_built["eagle3"].bundle("linear") / FILE_NAME).read_text())
    for change, message in (
        ({"draft": said["draft"] | {"vocab": 320}}, "draft.vocab must be below vocab 320, or left out; got 320"),
        ({"files": {k: v for k, v in said["files"].items() if k != TARGET_IDS}}, f"files must hold {TARGET_IDS}"),
    ):
        with pytest.raises(ValidationError, match=message):
            Manifest.model_validate_json(json.dumps({k: v for k, v in (said | change).items() if k != DIGEST}))


@pytest.mark.parametrize("form", CACHES)
def test_under_the_rejection_rule_a_seed_has_one_text_in_any_batch(built: Built, form: str) -> None:
    """Also in the round in which a prompt ends, where some drafters have not processed it yet.

    The grammar of one request masks its own drafts only, not those of others whose parameters ban tokens.
    """
    llm = built.llm(form)
    prompts = [[(31 * i + j * j) % 256 for j in range(12)] for i in range(8)]
    own: list[dict[str, Any]] = [{}, {"structured_outputs": {"regex": ".{40}"}}, {"banned_token_ids": range(0, 256, 2)}]
    params = [
        built.asked(rule="rejection", temperature=1.0, seed=seed, max_tokens=8, **own[seed % 3]) for seed in range(8)
    ]
    alone = [output_of(llm.generate(prompt, each)) for prompt, each in zip(prompts, params, strict=True)]
    assert [output_of(output) for output in llm.generate(prompts, params)] == alone


def test_several_layers_keep_the_same_pairs_of_a_prompt_in_chunks(all_built: dict[str, Built]) -> None:
    """In the lower slot: rounds of the other one pass over it between its parts."""
    built, prompt = all_built["mtp"], [(7 * i * i + 3) % 256 for i in range(60)]
    params = built.asked(max_tokens=1)
    kept: Queue[dict[str, torch.Tensor]] = Queue()

    with LLM(built.bundle("linear"), threads=1, prefill_chunk=16, prefix_caching=False) as llm:

        def keep(item: StreamOutput) -> None:
            if item.output is not None:
                rows = llm.loop.drafter.caches[1].rows(0, 1)  # type: ignore[attr-defined]
                kept.put({name: each[:, :, : len(prompt) - 4].clone() for name, each in rows.items()})

        def follow(item: StreamOutput) -> None:
            if item.output is not None:
                llm.submit(prompt, params, keep)

        llm.submit(prompt, params, keep)
        alone = kept.get(timeout=60)
        llm.submit([1, 2, 3], built.asked(max_tokens=2), follow)
        llm.submit([4, 5, 6], built.asked(max_tokens=60), lambda _: None)
        together = kept.get(timeout=60)
    for name, each in alone.items():
        torch.testing.assert_close(together[name], each, msg=name)


@pytest.mark.parametrize("form", CACHES)
def test_verification_reads_the_probabilities_that_drafts_were_sampled_from(built: Built, form: str) -> None:
    """Per row: with the noise of the draft's own stream, the probabilities give the drafted token."""
    llm, prompt, seed, checked = built.llm(form), SHARED[:20], 6, 0
    with Watched(built, form) as watched:
        output = llm.generate(prompt, built.asked(rule="rejection", temperature=1.0, seed=seed, max_tokens=20))
        known = len(prompt)
        for (drafts, count), probs in zip(watched.rounds, watched.probs, strict=True):
            for at, token in enumerate(drafts[: len(prompt) + 20 - known - 1]):
                noise = position_noise(seed, known + at, Purpose.DRAFT, VOCAB)
                with np.errstate(divide="ignore"):
                    assert int(np.argmax(np.log(probs[at]) + noise)) == token
                assert probs[at].sum() == pytest.approx(1.0, abs=1e-5)
                checked += 1
            known += count
    assert len(output.token_ids) == 20
    assert checked >= 12


@pytest.mark.parametrize("form", CACHES)
def test_a_recurrent_markov_head_forgets_the_last_block(all_built: dict[str, Built], form: str) -> None:
    """Every block is drawn from the probabilities of the definition, which begins each with a state of zeros."""
    built, prompt, checked = all_built["dspark"], SHARED[:20], 0
    drafts_of, known = built.drafts, len(prompt)
    assert isinstance(drafts_of, DSparkDrafts)
    with Watched(built, form) as watched:
        params = built.asked(rule="rejection", temperature=1.0, draft_temperature_scale=1.0, seed=6, max_tokens=20)
        text = [*prompt, *watched.llm.generate(prompt, params).token_ids]
        for (drafts, count), probs in zip(watched.rounds, watched.probs, strict=True):
            if drafts and len(prompt) <= known < len(text) and (known > len(prompt) or form == "linear"):
                expected = drafts_of.probs(text[:known], drafts)
                np.testing.assert_allclose(probs[: len(drafts)], expected, atol=1e-4)
                checked += 1
            known += count
    assert checked >= 3


@pytest.mark.parametrize(
    ("token", "config", "message"),
    [
        (320, {}, "pard_token should be an id below vocab_size, 320, it is 320"),
        (None, {}, "pard_token should be an id below vocab_size, 320, it is None"),
        (True, {}, "it is True"),
        (MASK, {"spd_type": "pard2"}, "spd_type is 'pard2', which the exporter does not implement"),
    ],
)
def test_checkpoints_of_other_drafts_are_rejected_as_pard(
    folder: Path, tmp_path: Path, token: Any, config: Any, message: str
) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        build(recipe_of("pard", tmp_path, folder / "target", pard(tmp_path / "draft", token, **config)), tmp_path / "x")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (replace(EAGLE3, hidden=64), "hidden_size should be the target's, 32, whose embedding it reads, it is 64"),
        (
            replace(EAGLE3, hidden=64, own_embedding=True),
            "tensor 'fc.weight' should be [64, 64], for 2 layers of a target whose hidden_size is 32, it is [64, 128]; "
            "choose a head that was trained for this target",
        ),
        (replace(EAGLE3, vocab=640), "vocab_size should be the target's, 320, it is 640; choose a head"),
    ],
)
def test_a_head_for_another_target_is_rejected_before_the_build(
    folder: Path, tmp_path: Path, head: Head, message: str
) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        open_models(recipe_of("eagle3", tmp_path, folder / "target", head.save(tmp_path / "draft")))
    assert message in str(caught.value)
