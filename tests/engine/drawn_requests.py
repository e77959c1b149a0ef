"""Requests drawn at random over everything that a request may ask for, for tests that hold texts to plain decoding."""

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from tandemrt import LLM, RequestOutput, SamplingParams
from tests.engine.test_invisible import LIKED, SCHEMA, TAGGED

Asked = tuple[list[int], dict[str, Any]]  # a prompt, and parameters

THINK = 264  # begins reasoning
STRUCTURES: Sequence[Mapping[str, Any]] = (
    {"json": SCHEMA},
    {"json": SCHEMA, "whitespace": "compact"},
    {"regex": "forced [ab] text [0-9]{3}"},
    {"choice": ["yes", "no", "perhaps not", "perhaps so"]},
    {"grammar": 'root ::= "[" [0-9]+ ("," [0-9]+){0,4} "]"'},
    {"structural_tag": {"format": TAGGED}},
)
LIMITS: Sequence[Mapping[str, Any]] = (
    {},
    {"stop": ["e", "th", "un"]},
    {"stop": ["a", " t"], "include_stop_str_in_output": True, "min_tokens": 5},
    {"stop_token_ids": [5, 6, 7, 8, 90], "min_tokens": 4, "ignore_eos": True},
    {"thinking_token_budget": 0},
    {"thinking_token_budget": 4},
    {"allowed_token_ids": [70, 71, 72, 100]},
    {"banned_token_ids": [10, 11, 12], "bad_words": ["a", "the", "zz"]},
)
BENT: Sequence[Mapping[str, Any]] = (
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"top_k": 5, "top_p": 0.9},
    {"min_p": 0.1},
    {"top_n_sigma": 1.2},
)
LOGPROBS: Sequence[Mapping[str, Any]] = (
    {},
    {"logprobs": 2},
    {"logprobs": 0, "logprobs_mode": "raw", "prompt_logprobs": 1},
)


def requests(known: Sequence[int]) -> st.SearchStrategy[list[Asked]]:
    """A few requests, of which some begin alike; ``known`` are tokens that the draft foresees, which some prefer."""
    drafted: Sequence[Mapping[str, Any]] = ({}, {"logit_bias": dict.fromkeys(known, 8.0)} if known else {})

    @st.composite
    def drawn(draw: st.DrawFn) -> Asked:
        seed, length = draw(st.integers(0, 2**64 - 1)), draw(st.sampled_from([1, 2, 17, 64, 66]))
        shared = draw(st.booleans())
        prompt = [(7 * i * i + (0 if shared else seed)) % 256 for i in range(length)]
        structure = draw(st.sampled_from([None, *STRUCTURES]))
        limits = dict(draw(st.sampled_from(LIMITS)))
        if structure is not None:
            limits.pop("allowed_token_ids", None)  # which leave nothing to most of them
        bent = {**draw(st.sampled_from(drafted)), **draw(st.sampled_from(BENT))}
        if structure is not None:
            bent |= {"structured_outputs": structure, "logit_bias": LIKED}
        return prompt + [THINK] * draw(st.booleans()), {
            **limits,
            **bent,
            **draw(st.sampled_from(LOGPROBS)),
            "temperature": draw(st.sampled_from([0.0, 0.7, 1.0, 1.5])),
            "seed": seed,
            "max_tokens": draw(st.sampled_from([5, 9, 20])),
            "n": draw(st.sampled_from([1, 1, 2])),
            "priority": draw(st.sampled_from([0, 0, -1])),
            "rule": draw(st.sampled_from(["coupled", "coupled", "rejection"])),
        }

    return st.lists(drawn(), min_size=1, max_size=5)


WAYS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "num_draft_tokens": st.integers(0, 3),
        "draft_greedy_below": st.just(1.0),
        "draft_temperature_scale": st.sampled_from([0.01, 0.3, 3.0]),
    },
)
"""How a request is drafted for, which must not show."""


def check_each_alone(
    llm: LLM, linear: LLM, requests: Sequence[Asked], drafting: Mapping[str, Any], *, exact: bool
) -> None:
    """Check that requests, sent together to ``llm`` with ``drafting`` (WAYS), say what each says alone.

    Under the coupled rule that is what ``linear`` says without drafts. Under the rejection rule a text depends on its
    own drafts, so ``llm`` says it. Logprobs are equal if ``exact``: other forms add in another order.
    """
    params = [SamplingParams(**asked, **drafting) for _, asked in requests]
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    for (prompt, asked), drafted, output in zip(requests, params, outputs, strict=True):
        if drafted.rule == "rejection":
            assert said(output, exact=exact) == said(llm.generate(prompt, drafted), exact=exact)
        else:
            alone = linear.generate(prompt, SamplingParams(**asked, num_draft_tokens=0))
            assert said(output, exact=exact) == said(alone, exact=exact)


def said(output: RequestOutput, *, exact: bool = True) -> list[Any]:
    """All that the outputs of a request say; unless ``exact``, without how likely their tokens were."""
    return [
        (
            *(each.token_ids, each.reasoning, each.text, each.finish_reason, each.stop_reason),
            (each.logprobs, each.prompt_logprobs) if exact else (),
        )
        for each in output.outputs
    ]
