"""Penalties and biases end to end: the text of autoregressive decoding for any draft, and of transformers."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from tandemrt import LLM, RequestOutput, SamplingParams
from tandemrt.runtime.requests.round import Round
from tests.engine.test_invisible import REQUESTS as UNADJUSTED
from tests.engine.test_invisible import SCHEMA, check_reversed_and_one_by_one, output_of, outputs

LOUD = dict.fromkeys(range(65, 75), 4.0)  # a few likely tokens, so that texts repeat themselves
PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "logit_bias": LOUD},
    {"repetition_penalty": 2.5, "logit_bias": LOUD},
    {"presence_penalty": -0.5, "frequency_penalty": 2.0, "repetition_penalty": 0.8, "logit_bias": LOUD},
]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *((f"the text {i}", {"temperature": 0.0, "max_tokens": 40, **p}) for i, p in enumerate(PENALTIES)),
    *((f"drawn {i}", {"temperature": 0.3, "seed": i, "max_tokens": 40, **p}) for i, p in enumerate(PENALTIES)),
    ("filters", {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "seed": 3, "max_tokens": 30, **PENALTIES[3]}),
    ("json <think>", {"seed": 11, "thinking_token_budget": 9, "structured_outputs": {"json": SCHEMA}, **PENALTIES[1]}),
    *UNADJUSTED[:4],
]


@pytest.fixture(scope="module")
def autoregressive(tiny_bundle: Path) -> list[Any]:
    return [output_of(output) for output in outputs(tiny_bundle, requests=REQUESTS, num_draft_tokens=0)]


def test_every_penalty_changes_its_text(tiny_bundle: Path, autoregressive: list[Any]) -> None:
    bare = [(prompt, {k: v for k, v in params.items() if k not in PENALTIES[3]}) for prompt, params in REQUESTS]
    unadjusted = [output_of(output) for output in outputs(tiny_bundle, requests=bare, num_draft_tokens=0)]
    changed = [a[0] != b[0] for a, b in zip(autoregressive, unadjusted, strict=True)]
    assert changed == [True] * 10 + [False] * 4


@pytest.mark.parametrize("window", [1, 3, 8])
def test_any_draft_window_gives_the_text_of_autoregressive_decoding(
    tiny_bundle: Path, autoregressive: list[Any], window: int
) -> None:
    speculative = outputs(tiny_bundle, requests=REQUESTS, num_draft_tokens=window)
    assert [output_of(output) for output in speculative] == autoregressive
    assert sum(output.speculation.num_accepted_draft_tokens for output in speculative[:10]) > 20


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_changes_no_token(tiny_bundle: Path, autoregressive: list[Any], overlap: bool) -> None:
    assert [
        output_of(o) for o in outputs(tiny_bundle, requests=REQUESTS, num_draft_tokens=4, overlap=overlap)
    ] == autoregressive


def test_ngram_drafts_change_no_token(ngram_bundle: Path, autoregressive: list[Any]) -> None:
    looked_up = outputs(ngram_bundle, requests=REQUESTS)
    assert [output_of(output) for output in looked_up] == autoregressive
    assert sum(output.speculation.num_draft_tokens for output in looked_up[:10]) > 10


def test_other_requests_and_slots_change_no_token(tiny_bundle: Path, autoregressive: list[Any]) -> None:
    check_reversed_and_one_by_one(tiny_bundle, REQUESTS, autoregressive)


def test_the_rejection_rule_is_reproducible_and_changes_no_coupled_request(
    tiny_bundle: Path, autoregressive: list[Any]
) -> None:
    mixed = [(p, params | ({"rule": "rejection"} if i % 2 else {})) for i, (p, params) in enumerate(REQUESTS)]
    first, second = (outputs(tiny_bundle, requests=mixed) for _ in range(2))
    assert [output_of(output) for output in first] == [output_of(output) for output in second]
    assert [output_of(output) for output in first[::2]] == autoregressive[::2]
    assert [output_of(output) for output in first[:4]] == autoregressive[:4]  # greedy, so equal under every rule


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_a_greedy_text_is_that_of_transformers(tiny_bundle: Path, penalties: dict[str, Any], window: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, num_draft_tokens=window, **penalties)
    with LLM(tiny_bundle, threads=1) as llm:
        output = llm.generate("compare the text", params)
    assert output.token_ids == by_transformers(tiny_bundle.parent / "target", output, params)


def by_transformers(checkpoint: Path, output: RequestOutput, params: SamplingParams) -> list[int]:
    """The processors of transformers in the order of vLLM. OpenAI's penalties have none and are computed by formula."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    repetition = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    biases = [[[token], bias] for token, bias in (params.logit_bias or {}).items()]
    prompt = output.prompt_token_ids
    tokens: list[int] = []
    while len(tokens) < len(output.token_ids):
        text = torch.tensor([prompt + tokens])
        with torch.no_grad():
            logits = model(text).logits[:, -1, : 262 + 5]  # ids beyond the tokenizer's are padding
        logits = SequenceBiasLogitsProcessor(biases)(text, logits) if biases else logits
        logits = repetition(text, logits)
        for token, count in Counter(tokens).items():
            logits[0, token] -= params.frequency_penalty * count + params.presence_penalty
        tokens.append(int(logits.argmax()))
    return tokens


def test_a_large_bias_forces_or_excludes_a_token(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        forced = llm.generate("x", SamplingParams(seed=1, max_tokens=20, logit_bias={70: 100}))
        assert forced.token_ids == [70] * 20
        usual = llm.generate("x", SamplingParams(temperature=0.5, seed=1, max_tokens=20, ignore_eos=True))
        kept_out = dict.fromkeys(usual.token_ids, -100)
        other = llm.generate(
            "x", SamplingParams(temperature=0.5, seed=1, max_tokens=20, ignore_eos=True, logit_bias=kept_out)
        )
        assert not set(other.token_ids) & set(usual.token_ids)


def test_no_bias_breaks_a_constraint(tiny_bundle: Path) -> None:
    """Masks apply last: masked tokens stay masked, and allowed tokens stay possible."""
    with LLM(tiny_bundle, threads=1) as llm:
        digits = {"structured_outputs": {"regex": "[0-9]{4}"}, "thinking_token_budget": 0, "seed": 2}
        for bias in ({70: 100}, dict.fromkeys(range(15, 25), -100), {llm.bundle.stop_ids[0]: 100}):
            output = llm.generate("digits", SamplingParams(logit_bias=bias, repetition_penalty=1.9, **digits))
            assert (len(output.text), output.text.isdigit(), output.finish_reason) == (4, True, "stop")
        ids = {"banned_token_ids": [70], "logit_bias": {70: 100, 71: 50}, "max_tokens": 5}
        assert llm.generate("x", SamplingParams(seed=2, **ids)).token_ids == [71] * 5


def test_rounds_without_penalties_run_no_adjustment(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        target, columns = llm.loop.target, []
        adjust = target.adjust

        def record(round_: Round) -> None:
            columns.append(target.buffers.entries.columns)
            adjust(round_)

        monkeypatch.setattr(target, "adjust", record)
        llm.generate("x", SamplingParams(seed=1, max_tokens=10))
        assert set(columns) == {0}
        llm.generate("x", SamplingParams(seed=1, max_tokens=10, presence_penalty=1))
        assert set(columns) == {0, 64}
        llm.generate("x", SamplingParams(seed=1, max_tokens=10))
        assert target._adjust_call.cache_info().currsize <= 2
        assert columns[-1] == 0
