"""Forced tokens are drafted without a model, under every drafter, and change no text."""

from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe import Recipe
from tandemrt.export.build import build
from tandemrt.runtime.metrics import Metrics
from tests.engine.test_invisible import REQUESTS, told
from tests.makers import tiny_checkpoint, write_recipe

KEYS = ("alpha", "beta", "gamma")
SCHEMA = {"type": "object", "properties": {key: {"type": "boolean"} for key in KEYS}, "required": list(KEYS)}
ANSWERS: dict[str, Any] = {
    "structured_outputs": {"json": SCHEMA | {"additionalProperties": False}, "disable_any_whitespace": True},
    "max_tokens": 60,
}
WORDY: list[tuple[str, dict[str, Any]]] = [
    ("json<think></think>", ANSWERS | {"temperature": 0.0}),
    ("why <think>", ANSWERS | {"temperature": 1.0, "seed": 3, "thinking_token_budget": 3}),
    ("json</think>", ANSWERS | {"temperature": 1.0, "seed": 4, "window": 0}),
    ("free", {"temperature": 1.0, "seed": 5, "max_tokens": 20}),
    ("dear", {"temperature": 0.8, "seed": 6, "max_tokens": 10, "allowed_token_ids": [70]}),
]
ALL = [*REQUESTS[4:10:2], *WORDY]


@pytest.fixture(scope="module")
def undrafted_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of ``tiny_bundle`` alone, which drafts what is forced."""
    folder = tmp_path_factory.mktemp("undrafted")
    recipe = write_recipe(folder / "r.toml", target=tiny_checkpoint(folder / "target", seed=1))
    return build(Recipe.load(recipe), folder / "bundle").folder


@pytest.fixture(scope="module", params=["model", "ngram", "none"])
def bundle(request: pytest.FixtureRequest) -> Any:
    names = {"model": "tiny_bundle", "ngram": "ngram_bundle", "none": "undrafted_bundle"}
    return request.getfixturevalue(names[request.param])


def answered(bundle: Path, requests: list[tuple[str, dict[str, Any]]] = ALL, **options: Any) -> tuple[Any, Metrics]:
    with LLM(bundle, threads=1, **options) as llm:
        outputs = llm.generate([prompt for prompt, _ in requests], [SamplingParams(**params) for _, params in requests])
        return [told(output) for output in outputs], llm.metrics.copy()


@pytest.fixture(scope="module")
def plain(tiny_bundle: Path) -> Any:
    return answered(tiny_bundle, window=0)[0]


@pytest.mark.parametrize(
    "options", [{}, {"overlap": True, "forced_drafts": True}, {"window": 1}, {"adaptive_window": True}]
)
def test_forced_tokens_change_no_text_under_any_drafter(bundle: Path, plain: Any, options: dict[str, Any]) -> None:
    texts, metrics = answered(bundle, **options)
    assert texts == plain
    assert metrics.forced_drafts > 0
    assert metrics.evaluated + metrics.cut_drafts == metrics.drafted


def test_they_save_rounds_and_can_be_switched_off(bundle: Path, plain: Any) -> None:
    json = ALL.index(WORDY[0])
    forced, without = (answered(bundle, WORDY[:1], forced_drafts=on) for on in (True, False))
    assert forced[0] == without[0] == plain[json : json + 1]
    assert without[1].forced_drafts == 0
    assert forced[1].rounds < without[1].rounds


def test_without_drafts_rounds_are_plain_wherever_nothing_is_forced(undrafted_bundle: Path) -> None:
    texts, metrics = answered(undrafted_bundle, [("free", {"temperature": 1.0, "seed": 5, "max_tokens": 20})])
    assert (metrics.rounds, metrics.drafted, metrics.seconds["propose"]) == (20, 0, 0.0)
    assert len(texts[0][0]) == 20


def test_where_forced_tokens_fill_the_window_no_model_is_asked(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice of one text: nothing but its end is anybody's to choose."""
    only = {"structured_outputs": {"choice": ["one text and no other"]}, "temperature": 1.0, "seed": 1}
    with LLM(tiny_bundle, threads=1, window=1) as llm:
        asked, propose = [], llm.loop.drafter.propose
        monkeypatch.setattr(llm.loop.drafter, "propose", lambda this: asked.append(this) or propose(this))
        output = llm.generate("<think></think>", SamplingParams(**only, max_tokens=40))
        assert output.text == "one text and no other"
        assert len(asked) <= 1 < llm.metrics.rounds


def test_under_the_rejection_rule_a_seed_has_one_text(tiny_bundle: Path, plain: Any) -> None:
    rejecting = [(prompt, params | {"rule": "rejection"}) for prompt, params in WORDY[:2]]
    first, second = (answered(tiny_bundle, rejecting) for _ in range(2))
    assert first[0] == second[0]
    assert first[0][0] == plain[ALL.index(WORDY[0])]  # greedy
    assert first[1].forced_drafts > 0
