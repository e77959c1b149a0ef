"""Fast-forward tokens are drafted without a model, under every drafter, and change no text."""

from pathlib import Path
from typing import Any

import pytest

from tandemrt import SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.engine_loop.verify_inputs import DraftsToVerify, DraftToVerify
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest
from tests.engine.test_invisible import REQUESTS, open_llm, output_of
from tests.makers import tiny_checkpoint, write_recipe

KEYS = ("alpha", "beta", "gamma")
SCHEMA = {"type": "object", "properties": {key: {"type": "boolean"} for key in KEYS}, "required": list(KEYS)}
ANSWERS: dict[str, Any] = {
    "structured_outputs": {"json": SCHEMA | {"additionalProperties": False}, "whitespace": "compact"},
    "max_tokens": 60,
}
WORDY: list[tuple[str, dict[str, Any]]] = [
    ("json<think></think>", ANSWERS | {"temperature": 0.0}),
    ("why <think>", ANSWERS | {"temperature": 1.0, "seed": 3, "thinking_token_budget": 3}),
    ("json</think>", ANSWERS | {"temperature": 1.0, "seed": 4, "num_draft_tokens": 0}),
    ("only</think>", {"structured_outputs": {"choice": ["one text and no other"]}, "seed": 7, "max_tokens": 40}),
    ("free", {"temperature": 1.0, "seed": 5, "max_tokens": 20}),
    ("dear", {"temperature": 0.8, "seed": 6, "max_tokens": 10, "allowed_token_ids": [70]}),
]
ALL = [*REQUESTS[4:10:2], *WORDY]


@pytest.fixture(scope="module")
def undrafted_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of ``tiny_bundle`` without a drafter: it drafts fast-forward tokens only."""
    folder = tmp_path_factory.mktemp("undrafted")
    recipe = write_recipe(folder / "r.toml", target=tiny_checkpoint(folder / "target", seed=1))
    return build(Recipe.load(recipe), folder / "bundle").folder


@pytest.fixture(scope="module", params=["model", "ngram", "none"])
def bundle(request: pytest.FixtureRequest) -> Any:
    names = {"model": "tiny_bundle", "ngram": "ngram_bundle", "none": "undrafted_bundle"}
    return request.getfixturevalue(names[request.param])


def answered(bundle: Path, requests: list[tuple[str, dict[str, Any]]] = ALL, **options: Any) -> tuple[Any, Metrics]:
    with open_llm(bundle, **options) as llm:
        outputs = llm.generate([prompt for prompt, _ in requests], [SamplingParams(**params) for _, params in requests])
        return [output_of(output) for output in outputs], llm.metrics.copy()


@pytest.fixture(scope="module")
def plain(tiny_bundle: Path) -> Any:
    return answered(tiny_bundle, num_draft_tokens=0)[0]


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True, "fast_forward_drafts": True}, {"num_draft_tokens": 3}, {"adaptive_draft_tokens": True}],
)
def test_fast_forward_tokens_change_no_text_under_any_drafter(
    bundle: Path, plain: Any, options: dict[str, Any]
) -> None:
    texts, metrics = answered(bundle, **options)
    assert texts == plain
    assert metrics.fast_forward_drafts > 0
    assert metrics.evaluated + metrics.constraint_rejected_drafts == metrics.drafted


def test_fast_forward_tokens_save_rounds_and_can_be_switched_off(bundle: Path, plain: Any) -> None:
    json = ALL.index(WORDY[0])
    with_them, without = (answered(bundle, WORDY[:1], fast_forward_drafts=on) for on in (True, False))
    assert with_them[0] == without[0] == plain[json : json + 1]
    assert without[1].fast_forward_drafts == 0
    assert with_them[1].rounds < without[1].rounds


def test_without_a_drafter_only_fast_forward_tokens_are_drafted(undrafted_bundle: Path) -> None:
    texts, metrics = answered(undrafted_bundle, [("free", {"temperature": 1.0, "seed": 5, "max_tokens": 20})])
    assert (metrics.rounds, metrics.drafted, metrics.seconds["propose"]) == (20, 0, 0.0)
    assert len(texts[0][0]) == 20


def test_the_draft_is_skipped_when_fast_forward_tokens_fill_the_window(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice of one text: nothing but its end is anybody's to choose."""
    only = {"structured_outputs": {"choice": ["one text and no other"]}, "temperature": 1.0, "seed": 1}
    with open_llm(tiny_bundle, num_draft_tokens=1) as llm:
        asked, propose = [], llm.loop.drafter.propose
        monkeypatch.setattr(llm.loop.drafter, "propose", lambda round_: asked.append(round_) or propose(round_))
        output = llm.generate("<think></think>", SamplingParams(**only, max_tokens=40))
        assert output.text == "one text and no other"
        assert len(asked) <= 1 < llm.metrics.rounds


def test_fast_forward_tokens_do_not_count_as_acceptance_of_the_draft(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour without a constraint keeps the drafter at work while every token of the other text is forced."""
    only = {"structured_outputs": {"choice": ["one text and no other"]}}
    requests = [("<think></think>", only), ("free", {"ignore_eos": True})]
    with open_llm(tiny_bundle, adaptive_draft_tokens=True, draft_masks=False) as llm:
        windows = llm.loop.draft_windows
        monkeypatch.setattr(windows, "choose", lambda *_args, **_kwargs: windows.largest)
        observed: list[tuple[RunningRequest, int, int]] = []
        monkeypatch.setattr(windows, "observe", lambda *each: observed.append(each))
        params = [SamplingParams(temperature=1.0, seed=1, max_tokens=60, **each) for _, each in requests]
        output, _ = llm.generate([prompt for prompt, _ in requests], params)
        assert output.text == "one text and no other"
        assert output.speculation.num_accepted_draft_tokens > 10
    counts = [(accepted, proposed) for running, accepted, proposed in observed if running.request.output is output]
    assert sum(proposed for _, proposed in counts) > 10
    assert sum(accepted for accepted, _ in counts) == 0


@pytest.mark.parametrize("bundle", ["model", "ngram"], indirect=True)
def test_fast_forward_tokens_are_counted_beside_a_request_that_copies(bundle: Path) -> None:
    """Then no drafter runs, and a copy may begin with fast-forward tokens."""
    asked = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 60}
    copying = SamplingParams(**asked, logit_bias={70: 60, 71: 60})
    forced = SamplingParams(structured_outputs={"choice": ["one text and no other"]}, temperature=0.0, max_tokens=40)
    with open_llm(bundle, lookup=True) as llm:
        llm.generate("<think></think>", forced)
        alone = llm.metrics.fast_forward_drafts
        llm.generate([[70, 71] * 10, "<think></think>"], [copying, forced])
        assert llm.metrics.fast_forward_drafts == 2 * alone > 20


def test_under_the_rejection_rule_a_seed_has_one_text(tiny_bundle: Path, plain: Any) -> None:
    rejecting = [(prompt, params | {"rule": "rejection"}) for prompt, params in WORDY[:2]]
    first, second = (answered(tiny_bundle, rejecting) for _ in range(2))
    assert first[0] == second[0]
    assert first[0][0] == plain[ALL.index(WORDY[0])]  # greedy
    assert first[1].fast_forward_drafts > 0


@pytest.mark.parametrize(("rule", "all_fast_forward"), [("rejection", True), ("coupled", False)])
def test_a_draft_that_a_row_allows_is_a_fast_forward_token_under_the_rejection_rule_only(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, rule: str, all_fast_forward: bool
) -> None:
    """Its acceptance must not depend on which token was drafted. The neighbour keeps the drafter at work."""
    only = {"structured_outputs": {"choice": ["one text and no other"]}, "rule": rule, "max_tokens": 40}
    requests = [("<think></think>", only), ("free", {"ignore_eos": True, "max_tokens": 60})]
    with open_llm(tiny_bundle, draft_masks=True, adaptive_draft_tokens=False) as llm:
        written: list[DraftToVerify] = []
        write = llm.loop._verify_inputs.write

        def observe(round_: Round) -> DraftsToVerify:
            drafts = write(round_)
            running = next((each for each in round_.rows.values() if each.grammar_time is not None), None)
            if running is not None and running.slot in drafts.alone and not round_.only_fast_forward:
                written.append(drafts.alone[running.slot])
            return drafts

        monkeypatch.setattr(llm.loop._verify_inputs, "write", observe)
        params = [SamplingParams(temperature=1.0, seed=1, **each) for _, each in requests]
        assert llm.generate([prompt for prompt, _ in requests], params)[0].text == "one text and no other"
    drafted = [each for each in written[:-1] if each.tokens]  # the last window goes past the end of the text
    assert drafted
    assert all(each.fast_forward == [*range(len(each.tokens))] for each in drafted) == all_fast_forward


def test_the_draft_probabilities_of_fast_forward_tokens_are_zero_in_every_slot(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first slot has no fast-forward tokens, and drafts as long as the second has some."""
    only = {"structured_outputs": {"choice": ["one text and no other"]}, "max_tokens": 40}
    requests = [("free", {"ignore_eos": True, "max_tokens": 60}), ("<think></think>", only)]
    expected: list[tuple[int, list[int]]] = []
    zeros: list[tuple[int, list[int]]] = []
    with open_llm(tiny_bundle, draft_masks=True, adaptive_draft_tokens=False) as llm:
        write, vocab = llm.loop._stages.write_inputs, llm.bundle.manifest.vocab

        def observe(round_: Round, draft_probs: Buffer | None) -> DraftsToVerify:
            drafts = write(round_, draft_probs)
            if draft_probs is not None:
                probs = draft_probs.view(round_.batch, round_.window, vocab)
                for slot, length in drafts.lengths.items():
                    expected.append((slot, drafts.alone[slot].fast_forward if slot in drafts.alone else []))
                    zeros.append((slot, [row for row in range(length) if not probs[slot, row].any()]))
            return drafts

        monkeypatch.setattr(llm.loop._stages, "write_inputs", observe)
        params = [SamplingParams(temperature=1.0, seed=1, rule="rejection", **each) for _, each in requests]
        llm.generate([prompt for prompt, _ in requests], params)
    assert zeros == expected
    assert {slot for slot, rows in expected if rows} == {1}


def test_a_text_under_the_rejection_rule_does_not_depend_on_fast_forward_tokens_of_others(ngram_bundle: Path) -> None:
    """Where a reasoning block ends unforeseen, a request drafts no fast-forward tokens, whatever others draft."""
    drafting = SamplingParams(**ANSWERS, temperature=1.0, seed=1)
    with open_llm(ngram_bundle, fast_forward_drafts=True) as llm:
        [end] = llm.tokenize("</think>", add_special_tokens=False)
        for seed in range(8):
            params = SamplingParams(**ANSWERS, temperature=1.0, seed=seed, rule="rejection", logit_bias={end: 4.0})
            alone = llm.generate("why <think>", params)
            [_, together] = llm.generate(["json</think>", "why <think>"], [drafting, params])
            assert output_of(together) == output_of(alone)
        assert llm.metrics.fast_forward_drafts > 0


def test_under_the_rejection_rule_no_window_of_others_adds_fast_forward_tokens(ngram_bundle: Path) -> None:
    """Where a forced end follows copies that are shorter than those of another request."""
    asked = {"temperature": 1.0, "rule": "rejection", "ignore_eos": True, "max_tokens": 24}
    copying = SamplingParams(**asked, logit_bias={70: 60, 71: 60})
    forced = 0
    with open_llm(ngram_bundle) as llm:
        for seed in range(6):
            params = SamplingParams(**asked, seed=seed, thinking_token_budget=4, logit_bias={65: 8, 66: 8})
            prompt = "ab" * 6 + "<think>"
            alone = llm.generate(prompt, params)
            _, beside = llm.generate([[70, 71] * 10, prompt], [copying, params])
            assert (output_of(beside), beside.speculation) == (output_of(alone), alone.speculation)
            forced += alone.forced_ends
    assert forced >= 3


def test_under_the_rejection_rule_the_choice_to_copy_does_not_depend_on_rounds_that_draft_for_others(
    tiny_bundle: Path,
) -> None:
    """The drafter runs for others where forced tokens fill a window; that says nothing about its own drafts."""
    asked = {"temperature": 1.0, "rule": "rejection", "ignore_eos": True, "max_tokens": 60}
    drafting, prompt = SamplingParams(**asked, seed=9), "ab" * 8
    with open_llm(tiny_bundle, lookup=True, fill_timeout_s=10.0) as llm:
        for seed in (0, 4):
            structured = {"regex": "forced text that is long [ab]{30}"}
            params = SamplingParams(**asked, seed=seed, structured_outputs=structured)
            alone = llm.generate(prompt, params)
            _, beside = llm.generate(["why", prompt], [drafting, params])
            assert (output_of(beside), beside.speculation) == (output_of(alone), alone.speculation)
        assert llm.metrics.fast_forward_drafts > 0
