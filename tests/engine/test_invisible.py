"""Speculation changes no token: the same seed gives the same text, for any draft.

The model is random, so its text is noise and one wrong token changes all following ones.
"""

from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt import LLM, RequestOutput, SamplingParams, StructuredOutputs
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tests.makers import write_recipe

SOME = 200  # of 320 tokens
# On a busy machine a grammar may take more than 10 s, and its request would end with an error.
open_llm = partial(LLM, threads=1, grammar_timeout_s=120.0)

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy", "zzz"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}

TAGGED = {
    "type": "triggered_tags",
    "triggers": ["K", "Q", "<tool_call>"],  # the last one is a control token
    "tags": [
        {"begin": "K", "content": {"type": "regex", "pattern": "[ab]{2,5}"}, "end": "!"},
        {"begin": "Q", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "!"},
        {"begin": "<tool_call>a", "content": {"type": "any_text"}, "end": "<tool_call>"},
    ],
}
LIKED = {42: 6, 48: 6, 266: 9}  # K, Q and the control token, so that structural tags begin

# (prompt, parameters): every constraint and filter, greedy and sampled, in one batch of few slots
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("hello the world", {"temperature": 0.0, "max_tokens": 30}),
    ("hello the world", {"temperature": 0.7, "seed": 5, "max_tokens": 30}),
    ("and the", {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": -3, "max_tokens": 25}),
    ("and the", {"temperature": 1.6, "top_n_sigma": 1.3, "top_k": 90, "seed": 21, "max_tokens": 25}),
    ("x", {"temperature": 1.0, "seed": 2**64 - 1, "max_tokens": 1}),
    ("why <think>", {"temperature": 0.9, "seed": 8, "thinking_token_budget": 7, "max_tokens": 40}),
    ("why <think>", {"temperature": 0.0, "thinking_token_budget": 0, "max_tokens": 20}),
    (
        "json <think>",
        {"temperature": 1.0, "seed": 11, "thinking_token_budget": 9, "structured_outputs": {"json": SCHEMA}},
    ),
    ("json", {"temperature": 0.0, "structured_outputs": {"json": SCHEMA}}),
    ("one of", {"temperature": 2.0, "seed": 4, "structured_outputs": {"choice": ["left", "right", "let it be"]}}),
    ("digits", {"temperature": 1.0, "seed": 1, "structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}),
    (
        "tags",
        {
            "seed": 2,
            "max_tokens": 60,
            "logit_bias": LIKED,
            "structured_outputs": {"structural_tag": {"format": TAGGED}},
        },
    ),
    ("a long prompt " * 5, {"temperature": 0.8, "seed": 6, "max_tokens": 12, "stop": ["a", "ne"]}),
    ("keep out", {"temperature": 1.5, "seed": 12, "max_tokens": 30, "bad_words": ["a", "the", "!"]}),
    ("no end", {"temperature": 1.0, "seed": 7, "min_tokens": 20, "max_tokens": 24, "banned_token_ids": [3, 4, 5]}),
]


def outputs(
    bundle: Path, *, requests: list[tuple[str, dict[str, Any]]] = REQUESTS, **options: Any
) -> list[RequestOutput]:
    with open_llm(bundle, **options) as llm:
        return llm.generate([prompt for prompt, _ in requests], [SamplingParams(**params) for _, params in requests])


@pytest.fixture(scope="module")
def autoregressive(tiny_bundle: Path) -> list[tuple[list[int], str, str, str]]:
    return [output_of(output) for output in outputs(tiny_bundle, num_draft_tokens=0)]


def output_of(output: RequestOutput) -> tuple[list[int], str, str, str]:
    """What a request says, and how it ended: with which error, or for which reason."""
    return output.token_ids, output.reasoning, output.text, output.error or output.finish_reason


def check_reversed_and_one_by_one(
    bundle: Path, requests: list[tuple[str, dict[str, Any]]], autoregressive: list[Any]
) -> None:
    """Check that the texts are ``autoregressive`` in reverse order (so in other slots and batches) and one by one."""
    backwards = outputs(bundle, requests=requests[::-1], num_draft_tokens=3)
    assert [output_of(output) for output in backwards[::-1]] == autoregressive
    with open_llm(bundle) as llm:
        alone = [llm.generate(prompt, SamplingParams(**params)) for prompt, params in requests]
    assert [output_of(output) for output in alone] == autoregressive


def test_the_requests_end_in_many_ways(autoregressive: list[tuple[list[int], str, str, str]]) -> None:
    assert {finish for *_, finish in autoregressive} == {"stop", "length"}
    assert sum(bool(reasoning) for _, reasoning, _, _ in autoregressive) >= 2


@pytest.mark.parametrize("window", [1, 2, 8])  # the others in any sequence below
def test_any_draft_window_gives_the_text_of_autoregressive_decoding(
    tiny_bundle: Path, autoregressive: list[Any], window: int
) -> None:
    speculative = outputs(tiny_bundle, num_draft_tokens=window)
    assert [output_of(output) for output in speculative] == autoregressive
    assert sum(output.speculation.num_accepted_draft_tokens for output in speculative) > 0


@pytest.mark.parametrize("window", [0, 4])
def test_overlap_changes_no_token(tiny_bundle: Path, autoregressive: list[Any], window: int) -> None:
    assert [output_of(o) for o in outputs(tiny_bundle, num_draft_tokens=window, overlap=True)] == autoregressive
    assert [output_of(o) for o in outputs(tiny_bundle, num_draft_tokens=window, overlap=False)] == autoregressive


def test_ngram_drafts_change_no_token(ngram_bundle: Path, autoregressive: list[Any]) -> None:
    looked_up = outputs(ngram_bundle)
    assert [output_of(output) for output in looked_up] == autoregressive
    assert sum(output.speculation.num_draft_tokens for output in looked_up) > 0


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_draft_that_proposes_some_tokens_changes_no_token(
    tiny_bundle: Path, autoregressive: list[Any], tmp_path: Path, dtype: str
) -> None:
    checkpoints = tiny_bundle.parent
    drafting = f'kind = "model"\ncheckpoint = "{checkpoints / "draft"}"\ndtype = "{dtype}"\nvocab = {SOME}\n'
    recipe = write_recipe(tmp_path / "some.toml", target=checkpoints / "target", drafting=drafting)
    bundle = build(Recipe.load(recipe), tmp_path / "bundle").folder
    assert Bundle.open(bundle).contract("draft")["logits"].shape[2] == SOME
    with open_llm(bundle) as llm:
        params = [SamplingParams(**params) for _, params in REQUESTS]
        assert [output_of(each) for each in llm.generate([prompt for prompt, _ in REQUESTS], params)] == autoregressive
        assert sum(llm.metrics.accepted) > 0
        rejection = SamplingParams(rule="rejection", seed=1, max_tokens=30)
        assert llm.generate("and the", rejection).finish_reason is not None


def test_an_adaptive_draft_window_changes_no_token(tiny_bundle: Path, autoregressive: list[Any]) -> None:
    with open_llm(tiny_bundle, adaptive_draft_tokens=True, overlap=True) as llm:
        asked = [params for _, params in REQUESTS]
        outputs = llm.generate([prompt for prompt, _ in REQUESTS], [SamplingParams(**params) for params in asked])
        assert [output_of(output) for output in outputs] == autoregressive
        assert llm.metrics.drafted > 0


@pytest.fixture(scope="module", params=[False, True], ids=["lockstep", "overlap"])
def adaptive(tiny_bundle: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm(tiny_bundle, overlap=request.param, adaptive_draft_tokens=True) as llm:
        yield llm


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=40),
    st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=6),
)
def test_any_sequence_of_draft_windows_changes_no_token(
    adaptive: LLM, autoregressive: list[Any], lengths: list[int], indices: list[int]
) -> None:
    windows, drawn = adaptive.loop.draft_windows, cycle(lengths)
    largest = partial(windows.choose, fixed=True)

    def choose(running: Any, batch: int, *, wanted: int, **_: Any) -> int:
        return min(next(drawn), largest(running, batch, wanted=wanted))

    gains = cycle([0.0, 0.003, 1.0])  # the draft stops early, by its own probabilities
    least_gain = patch.object(windows, "least_gain", lambda *_: next(gains))
    with patch.object(windows, "choose", choose), least_gain:
        requests = [REQUESTS[at] for at in indices]
        outputs = adaptive.generate(
            [prompt for prompt, _ in requests], [SamplingParams(**params) for _, params in requests]
        )
    assert [output_of(output) for output in outputs] == [autoregressive[at] for at in indices]


def test_sampled_and_greedy_drafts_in_one_batch_change_no_token(tiny_bundle: Path, autoregressive: list[Any]) -> None:
    ways: list[dict[str, Any]] = [{"draft_sampling": "greedy"}, {"draft_greedy_below": 0.95}, {}]
    ways += [{"draft_temperature_scale": 0.3}, {"draft_temperature_scale": 3}]
    mixed = [(prompt, params | ways[i % 5]) for i, (prompt, params) in enumerate(REQUESTS)]
    assert [output_of(output) for output in outputs(tiny_bundle, requests=mixed, num_draft_tokens=4)] == autoregressive


def test_other_requests_and_slots_change_no_token(tiny_bundle: Path, autoregressive: list[Any]) -> None:
    check_reversed_and_one_by_one(tiny_bundle, REQUESTS, autoregressive)


def test_requests_of_one_batch_may_have_different_draft_windows(tiny_bundle: Path, autoregressive: list[Any]) -> None:
    mixed = [(prompt, params | {"num_draft_tokens": i % 9}) for i, (prompt, params) in enumerate(REQUESTS)]
    assert [output_of(output) for output in outputs(tiny_bundle, requests=mixed)] == autoregressive


def test_a_request_without_a_seed_reports_a_seed_that_reproduces_it(tiny_bundle: Path) -> None:
    with open_llm(tiny_bundle) as llm:
        unseeded = SamplingParams(max_tokens=12, ignore_eos=True)
        first = llm.generate("hello", unseeded)
        again = llm.generate("hello", unseeded.model_copy(update={"seed": first.seed, "num_draft_tokens": 0}))
        other = llm.generate("hello", unseeded)
    assert again.token_ids == first.token_ids
    assert other.token_ids != first.token_ids


def test_greedy_requests_under_the_rejection_rule_equal_autoregressive_decoding(
    tiny_bundle: Path, autoregressive: list[Any]
) -> None:
    greedy = [(i, r) for i, r in enumerate(REQUESTS) if r[1].get("temperature") == 0.0]
    mixed = [(prompt, params | {"rule": "rejection"}) for _, (prompt, params) in greedy]
    sampled = [("noise", {"rule": "rejection", "seed": 3, "max_tokens": 30})]
    both = outputs(tiny_bundle, requests=mixed + sampled)
    assert [output_of(output) for output in both[:-1]] == [autoregressive[i] for i, _ in greedy]
    assert both[-1].speculation.num_accepted_draft_tokens > 0


def test_the_rejection_rule_is_reproducible_and_changes_no_coupled_request(
    tiny_bundle: Path, autoregressive: list[Any]
) -> None:
    mixed = [(p, params | ({"rule": "rejection"} if i % 2 else {})) for i, (p, params) in enumerate(REQUESTS)]
    first, second = (outputs(tiny_bundle, requests=mixed) for _ in range(2))
    assert [output_of(output) for output in first] == [output_of(output) for output in second]
    assert [output_of(output) for output in first[::2]] == autoregressive[::2]


def test_structured_outputs_may_be_given_as_an_object_or_as_a_mapping() -> None:
    structured = SamplingParams(structured_outputs={"json": SCHEMA}).structured_outputs  # type: ignore[arg-type]
    assert structured == StructuredOutputs(json=SCHEMA)
