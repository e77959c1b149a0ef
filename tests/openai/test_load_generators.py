"""Requests in the form of the load generators `vllm bench serve` and AIPerf, and what they read from the answers."""

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.openai.client import EXAMPLES, Served

# `vllm bench serve --backend openai --dataset-name random --temperature 0`, then `--backend openai-chat`, then AIPerf's
# `--endpoint-type chat --streaming` and `--endpoint-type completions` with the extra inputs that its tutorials set.
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "temperature": 0.0, "frequency_penalty": 0.0}
TEXT = EXAMPLES[0].prompt_messages()[0]["content"]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": (
        "/v1/completions",
        {"prompt": TEXT, "repetition_penalty": 1.0, "max_tokens": 12, "logprobs": None, "ignore_eos": True, **SAMPLING},
    ),
    "vllm tokens": (
        "/v1/completions",
        {"prompt": [5, 6, 7, 8], "repetition_penalty": 1.0, "max_tokens": 12, "logprobs": None, "ignore_eos": True},
    ),
    "vllm chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
            "max_completion_tokens": 12,
            "ignore_eos": True,
            **SAMPLING,
        },
    ),
    "aiperf chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": TEXT}],
            "max_completion_tokens": 12,
            "min_tokens": 12,
            "ignore_eos": True,
        },
    ),
    "aiperf": ("/v1/completions", {"prompt": TEXT, "max_tokens": 12, "min_tokens": 12, "ignore_eos": True}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_has_what_a_load_generator_counts(served: Served, name: str) -> None:
    path, fields = REQUESTS[name]
    headers = {"x-request-id": "bench-0", "X-Correlation-ID": "1"}
    status, text, _ = served.ask(path, {"model": "demo", **fields, **STREAM}, headers=headers)
    assert status == 200, text
    *events, done = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    *texts, last = chunks
    assert all(len(chunk["choices"]) == 1 for chunk in texts)
    assert last["choices"] == []  # the chunk of the usage has no token
    assert last["usage"]["completion_tokens"] == 12
    assert last["usage"]["prompt_tokens"] > 0
    speculation = last["metrics"]["speculative_decoding"]
    assert 0 < speculation["num_spec_steps"] <= 12


def test_a_model_card_has_what_vllm_reads_to_find_the_model(served: Served) -> None:
    card = served.ask("/v1/models")[1]["data"][0]
    assert (card["id"], card["root"], card["parent"]) == ("demo", "demo", None)


def test_prompts_are_aligned_with_the_tokenizer_as_vllm_does(served: Served) -> None:
    tokens = served.ask("/tokenize", {"model": "demo", "prompt": TEXT, "add_special_tokens": False})[1]["tokens"]
    assert served.ask("/detokenize", {"model": "demo", "tokens": tokens})[1]["prompt"] == TEXT


def test_the_counters_of_speculation_have_the_names_of_vllm(served: Served) -> None:
    """The answer of a request and the difference of the counters agree, as `vllm bench serve` computes acceptance."""

    def counters() -> dict[str, float]:
        metrics = served.metrics()
        return {name: value for name, value in metrics.items() if name.startswith("vllm:spec_decode_num_")}

    before = counters()
    path, fields = REQUESTS["aiperf"]
    counted = served.ask(path, {"model": "demo", **fields})[1]["metrics"]["speculative_decoding"]
    after = counters()
    grown = {name.removeprefix("vllm:spec_decode_num_"): after[name] - before[name] for name in after}
    assert grown["drafts_total"] == counted["num_spec_steps"]
    assert grown["accepted_tokens_total"] == counted["num_accepted_draft_tokens"]
    assert grown["draft_tokens_total"] == counted["num_draft_tokens"]
    by_position = [grown[f"accepted_tokens_per_pos_total {position}"] for position in range(4)]
    assert sum(by_position) == grown["accepted_tokens_total"]
    assert all(earlier >= later for earlier, later in pairwise(by_position))
