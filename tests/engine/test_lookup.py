"""Drafts copied from the text beside every kind of head: they change no text, and the head drafts as without them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.export.bundle.build import build
from tandemrt.runtime.engine_loop import loop
from tandemrt.runtime.llm import host_costs
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest
from tests.engine.draft_kinds import KINDS, SIZES, Target
from tests.engine.drawn_requests import WAYS, check_each_alone, requests
from tests.engine.test_drafts import SHARED, Built, Watched
from tests.engine.test_fast_forward_drafts import ALL
from tests.engine.test_invisible import REQUESTS, open_llm, output_of
from tests.engine.test_paged_rounds import PAGED
from tests.makers import tiny_checkpoint, write_recipe
from tests.plain.tiny_language import surprise

PROMPTS = [prompt for prompt, _ in (*REQUESTS, *ALL)]
PARAMS = [SamplingParams(**asked) for _, asked in (*REQUESTS, *ALL)]
FORMS = ("linear with lookup", "paged with lookup")


@pytest.fixture(autouse=True)
def waits_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rounds with overlap wait for all copies that promise more than the drafter."""
    monkeypatch.setattr(loop, "_WAITED_COMMITS", 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lookup")
    tiny_checkpoint(folder / "target", **SIZES)
    return folder


@pytest.fixture(scope="module")
def all_built(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Built]]:
    target = folder / "target"
    with ExitStack() as opened:
        yield {name: Built(name, folder / name, target, opened, tmp_path_factory) for name in KINDS}


@pytest.fixture(params=KINDS)
def built(all_built: dict[str, Built], request: pytest.FixtureRequest) -> Built:
    return all_built[request.param]


@pytest.fixture(scope="module")
def model_bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target and a draft model, over a linear and a paged cache."""
    folder = tmp_path_factory.mktemp("model")
    target = tiny_checkpoint(folder / "target", seed=1, head_dim=32)
    draft = tiny_checkpoint(folder / "draft", layers=1, seed=1, head_dim=32)
    bundles = {}
    for form, backend in (("linear", 'name = "onnxruntime-cpu"'), ("paged", PAGED)):
        drafting = f'kind = "model"\ncheckpoint = "{draft}"\nnum_draft_tokens = 4'
        recipe = write_recipe(folder / f"{form}.toml", target=target, drafting=drafting, backend=backend)
        bundles[form] = build(Recipe.load(recipe), folder / form).folder
    return bundles


@pytest.mark.parametrize("form", FORMS)
def test_a_head_drafts_as_its_definition_after_copies_that_it_did_not_draft(built: Built, form: str) -> None:
    """Its cache holds the tokens of rounds that copied, accepted or not."""
    emitted, checked = Counter[int](), 0
    with Watched(built, form) as watched:
        for length in (1, 65):
            prompt = [(11 * i * i + length) % 256 for i in range(length)]
            for temperature in (0.0, 1.0):
                output = watched.llm.generate(prompt, built.asked(temperature=temperature, seed=1, max_tokens=40))
                emitted.update(count for _, count in watched.rounds)
                if not temperature:
                    checked += watched.hold(prompt, output.token_ids)
                watched.rounds = []
        assert watched.copied_rounds >= 3
    assert checked >= 3
    assert len(emitted) >= 2, "drafts are accepted and rejected"


@pytest.mark.parametrize("form", FORMS)
def test_copies_change_no_token_beside_any_head(built: Built, form: str) -> None:
    llm = built.llm(form)
    copied = Counter[bool]()
    with counted_copies(llm, copied):
        prompts, params = [prompt for prompt, _ in built.requests], [each for _, each in built.requests]
        outputs = llm.generate(prompts, [SamplingParams(**each) for each in params])
    assert [output_of(output) for output in outputs] == built.autoregressive()
    assert copied[True] >= 2
    assert copied[False] > 5, "the head drafts too"


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_texts_equal_those_of_each_request_alone_in_any_mixture(built: Built, data: st.DataObject) -> None:
    """Grammars with fast-forward tokens and masked drafts, budgets, filters, greedy and sampled in one batch."""
    asked, way = data.draw(requests(built.known)), data.draw(WAYS)
    check_each_alone(built.llm(FORMS[0]), built.llm("linear"), asked, way, exact=True)


@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_texts_do_not_change_when_memory_is_short(built: Built, data: st.DataObject) -> None:
    """With overlap and preemption. Always the same requests: over a paged cache texts may part at a tie."""
    asked, way = data.draw(requests(built.known)), data.draw(WAYS)
    check_each_alone(built.llm(FORMS[1]), built.llm("linear"), asked, way, exact=False)


@pytest.fixture(scope="module")
def texts_without_drafts(model_bundles: dict[str, Path]) -> dict[str, list[Any]]:
    texts = {}
    for form, bundle in model_bundles.items():
        with open_llm(bundle, device="cpu", num_draft_tokens=0) as llm:
            texts[form] = [output_of(output) for output in llm.generate(PROMPTS, PARAMS)]
    return texts


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("linear", {}),
        ("paged", {"fast_forward_drafts": True}),
        ("paged", {"overlap": True}),
        ("paged", {"num_draft_tokens": 2}),
    ],
)
def test_copies_change_no_token_beside_a_draft_model(
    model_bundles: dict[str, Path],
    texts_without_drafts: dict[str, list[Any]],
    form: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_costs, "_ROW", 0.0)  # copies are not cut
    copied = Counter[bool]()
    with open_llm(model_bundles[form], device="cpu", lookup=True, **options) as llm, counted_copies(llm, copied):
        assert [output_of(output) for output in llm.generate(PROMPTS, PARAMS)] == texts_without_drafts[form]
    assert copied[True] > 20
    assert copied[False] > 20


@pytest.mark.parametrize("drafted", [0, 1])
def test_copies_are_longer_than_what_the_model_drafts_where_it_does_not_run(
    model_bundles: dict[str, Path], drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={70: 4, 71: 4, 72: 4})
    prompts, windows = [SHARED[first : first + 30] for first in range(4)], Counter[tuple[bool, int]]()
    with LLM(model_bundles["linear"], device="cpu", threads=1, lookup=True, adaptive_draft_tokens=True) as llm:
        autoregressive = llm.generate(prompts, params.model_copy(update={"num_draft_tokens": 0}))
        monkeypatch.setattr(llm.loop.draft_windows, "choose", lambda *_, wanted, **__: min(drafted, wanted))
        verify = llm.loop.target.verify

        def watched(round_: Round, draft_probs: Any) -> None:
            if not round_.fast_forward:
                windows[round_.needs_drafter, round_.window] += 1
            verify(round_, draft_probs)

        monkeypatch.setattr(llm.loop.target, "verify", watched)
        outputs = [llm.generate(prompt, params) for prompt in prompts]
    assert [output_of(output) for output in outputs] == [output_of(output) for output in autoregressive]
    assert {window for ran, window in windows if ran} == ({drafted} if drafted else set())
    assert windows[False, 4] > 5, "the bundle's largest window, copied"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("form", ["linear", "paged"])
def test_a_draft_model_drafts_its_own_text_after_copies(
    model_bundles: dict[str, Path], form: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache holds the tokens of rounds that copied, accepted or not: transformers drafts the same."""
    draft = Target(model_bundles[form].parent / "draft").model
    options: Any = {"lookup": True, "adaptive_draft_tokens": False}
    with LLM(model_bundles[form], device="cpu", threads=1, overlap=overlap, **options) as llm:
        write, rounds = llm.loop._verify_inputs.write, list[tuple[int, list[int] | None]]()

        def watched(round_: Round) -> Any:
            if 0 in round_.rows and round_.window:
                tokens = llm.loop.target.buffers.draft_tokens.host_view(round_.batch, round_.window)[0].tolist()
                rounds.append((len(round_.rows[0].tokens), None if 0 in round_.copied else tokens))
            return write(round_)

        monkeypatch.setattr(llm.loop._verify_inputs, "write", watched)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={70: 4, 71: 4, 72: 4})
        after_copies = 0
        for first in range(8):
            prompt = SHARED[first : first + 30]
            text = [*prompt, *llm.generate(prompt, params).token_ids]
            for (_, before), (length, drafts) in pairwise(rounds):
                if drafts is not None and length < len(text):
                    assert drafts == greedy(draft, text[:length], len(drafts)), f"after {length} tokens"
                    after_copies += before is None
            rounds.clear()
    assert after_copies >= 1


@torch.no_grad()
def greedy(model: Any, text: list[int], count: int) -> list[int]:
    """The most likely tokens after ``text``, one after the other."""
    tokens = list(text)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(text) :]


@pytest.mark.parametrize("form", FORMS)
def test_under_the_rejection_rule_a_seed_has_one_text_in_any_batch(built: Built, form: str) -> None:
    llm = built.llm(form)
    prompts = [[(31 * i + j * j) % 256 for j in range(12)] for i in range(5)]
    params = [built.asked(rule="rejection", temperature=1.0, seed=seed, max_tokens=16) for seed in range(5)]
    alone = [output_of(llm.generate(prompt, each)) for prompt, each in zip(prompts, params, strict=True)]
    assert [output_of(output) for output in llm.generate(prompts, params)] == alone


def test_a_preemption_changes_no_text_under_the_rejection_rule(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, grow, calls = built.llm(FORMS[1]), built.llm(FORMS[1]).loop.slots.grow, 0
    params = built.asked(temperature=1.0, seed=3, max_tokens=14, rule="rejection")

    def short(at: int) -> list[int]:
        def lacks_memory_once(running: RunningRequest) -> bool:
            nonlocal calls
            calls += 1
            return calls != at and grow(running)

        nonlocal calls
        calls = 0
        monkeypatch.setattr(llm.loop.slots, "grow", lacks_memory_once)
        return llm.generate([70, 71, 72] * 8, params).token_ids

    alone, before = short(at=0), llm.metrics.preemptions
    copied = Counter[bool]()
    with counted_copies(llm, copied):
        assert short(at=2) == alone
    assert llm.metrics.preemptions == before + 1
    assert copied[True] >= 2, "the dropped round copied"


@pytest.mark.parametrize("kind", ["eagle3", "pard"])
def test_copied_tokens_are_point_masses_of_the_rejection_rule(
    all_built: dict[str, Built], folder: Path, kind: str
) -> None:
    """Texts have the distribution of transformers. They are of three tokens, so that they repeat, and are copied."""
    prompt, bias, count, copied = [70, 71, 72, 70, 71, 72, 70, 71], {70: 0.5, 71: 0.2, 72: 0.0}, 750, Counter[bool]()
    llm = all_built[kind].llm(FORMS[0])
    asked = {"rule": "rejection", "max_tokens": 4, "ignore_eos": True, "logit_bias": bias, "allowed_token_ids": [*bias]}
    with counted_copies(llm, copied):
        outputs = llm.generate([prompt] * count, [SamplingParams(**asked, seed=seed) for seed in range(count)])
    assert copied[True] >= count
    texts = Counter(tuple(output.token_ids) for output in outputs)
    all_texts = list(product(bias, repeat=4))
    probabilities = probabilities_of(all_texts, Target(folder / "target").model, prompt, bias)
    assert surprise(np.array([texts[text] for text in all_texts]), probabilities) < 4


@torch.no_grad()
def probabilities_of(texts: list[tuple[int, ...]], model: Any, prompt: list[int], bias: dict[int, float]) -> np.ndarray:
    """The probability of each text after ``prompt`` among texts of the tokens of ``bias``."""
    logits = model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, len(prompt) - 1 : -1, [*bias]]
    logprobs = (logits.double() + torch.tensor([*bias.values()])).log_softmax(-1)
    chosen = torch.tensor([[[*bias].index(token) for token in text] for text in texts])
    return logprobs.gather(-1, chosen[..., None]).sum((1, 2)).exp().numpy()


@contextmanager
def counted_copies(llm: LLM, copied: Counter[bool]) -> Iterator[None]:
    """Count the rows of rounds with room for drafts, by whether they copied."""
    verify = llm.loop.target.verify

    def counting(round_: Round, draft_probs: Any) -> None:
        rows = [slot for slot, running in round_.rows.items() if round_.max_drafted(running) > 0]
        copied.update(bool(round_.copied.get(slot)) for slot in rows)
        verify(round_, draft_probs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(llm.loop.target, "verify", counting)
        yield


def test_an_llm_may_switch_the_lookup_on_and_off(all_built: dict[str, Built]) -> None:
    texts = []
    for option, expected in ((True, True), (False, False), (None, True)):
        with LLM(all_built["eagle3"].bundle("linear"), device="cpu", threads=1, lookup=option) as llm:
            assert (llm.loop.lookup is not None) == expected
            texts.append(llm.generate([70, 71, 72] * 8, all_built["eagle3"].asked()).token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_a_draft_without_a_model_cannot_switch_the_lookup(ngram_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"received False for draft.kind 'ngram'; use num_draft_tokens=0"):
        LLM(ngram_bundle, threads=1, lookup=False)
    recipe = write_recipe(tmp_path / "none.toml", target=tiny_checkpoint(tmp_path / "target"))
    bundle = build(Recipe.load(recipe), tmp_path / "bundle").folder
    with pytest.raises(BadRequest, match=r"received True for draft.kind 'none'; build with draft.kind 'ngram'"):
        LLM(bundle, threads=1, lookup=True)
