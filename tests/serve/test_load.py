"""Many clients at once: each gets its own output, and the metrics add up."""

import itertools
import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tandemrt import LLM, SamplingParams, StructuredOutputs
from tandemrt.engines.parameters.server_tensors import CLIENT
from tests.serve.client import Client, GrpcStream, text, token_ids
from tests.serve.prompts import EXAMPLES, endless, record_inputs
from tests.waiting import eventually
from tools.serve import TritonServer

CLIENTS = 32


def test_32_clients_with_mixed_parameters_each_get_the_python_apis_text(demo: Client, llm: LLM) -> None:
    """Half over HTTP, half over gRPC, half of each as a stream. The metrics count exactly these answers."""
    before = demo.metrics()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda at: ask(demo, at), range(CLIENTS)))
    expected = [expect(llm, at) for at in range(CLIENTS)]
    assert [answer["text"] for answer in answers] == [output.text for output in expected]
    for at, output in enumerate(expected):
        if at % 2 and output.stop_reason in llm.bundle.stop_ids:
            jsonschema.validate(json.loads(answers[at]["text"]), EXAMPLES[at % len(EXAMPLES)].schema)

    tokens = sum(len(output.token_ids) for output in expected)
    assert sum(answer["tokens"] for answer in answers) == tokens
    assert eventually(lambda: demo.counted(before)["tandemrt_kept_total"] == tokens)
    counted = demo.counted(before)
    for reason, count in Counter(output.finish_reason for output in expected).items():
        assert counted[f'tandemrt_finished_total{{reason="{reason}"}}'] == count
    prompts = sum(len(output.prompt_token_ids) - 1 for output in expected)
    assert counted["tandemrt_prefilled_total"] + counted["tandemrt_cached_total"] == prompts
    assert counted["tandemrt_forced_ends_total"] == sum(output.forced_ends for output in expected)
    assert counted["tandemrt_emitted_total"] >= tokens
    assert (
        counted["tandemrt_drafted_total"]
        == counted["tandemrt_evaluated_total"] + counted["tandemrt_constraint_rejected_drafts_total"]
    )
    records = [output.speculation for output in expected]
    assert counted["tandemrt_steps_total"] == counted["tandemrt_accepted_per_step_count"] > 0
    accepted = [counted[f'tandemrt_accepted_total{{position="{i}"}}'] for i in range(1, 1 + records[0].num_spec_tokens)]
    assert sum(accepted) == counted["tandemrt_accepted_per_step_sum"] > 0
    assert accepted == sorted(accepted, reverse=True)
    assert counted["tandemrt_reasoning_ends_mid_round_total"] > 0
    for histogram in ("queue_seconds", "time_to_first_token_seconds"):
        assert counted[f"tandemrt_{histogram}_count"] == len(expected)
    assert counted["tandemrt_inter_token_seconds_count"] == tokens - len(expected)
    assert demo.metrics()["tandemrt_requests_running"] == demo.metrics()["tandemrt_requests_waiting"] == 0


def test_every_request_of_a_flood_is_answered_or_rejected(server: TritonServer) -> None:
    """The queue has room for 2, so most of 64 clients are rejected at once and retry until served."""
    short = Client(server, "short")
    before = short.metrics()

    def insist(_: int) -> tuple[int, str]:
        for refusals in itertools.count():
            status, answer = short.generate(**endless(max_tokens=40))
            if status == 200:
                return refusals, answer["text_output"]
            assert "queue_limit: at most 2 requests may wait" in answer["error"]
            time.sleep(0.02)
        raise AssertionError

    with ThreadPoolExecutor(64) as pool:
        refusals, texts = zip(*pool.map(insist, range(64)), strict=True)
    assert sum(refusals) > 0
    assert len(set(texts)) == 1
    assert eventually(lambda: short.counted(before)['tandemrt_finished_total{reason="length"}'] == 64)
    assert short.counted(before)["tandemrt_kept_total"] == 64 * 40


@pytest.mark.parametrize("way", ["HTTP", "gRPC"])
def test_a_flooding_client_delays_only_itself(demo: Client, way: str) -> None:
    """One client keeps 40 requests unanswered, of which 8 run. A request of another client gets the next slot."""
    answered: list[int] = []
    enough = threading.Event()

    def flood() -> None:
        while not enough.is_set():
            answered.append(demo.generate(**endless(max_tokens=100, num_draft_tokens=0), **{CLIENT: "flood"})[0])

    with ThreadPoolExecutor(40) as pool:
        for _ in range(40):
            pool.submit(flood)
        try:
            assert eventually(lambda: demo.metrics()["tandemrt_requests_waiting"] >= 24)
            before = len(answered)
            if way == "HTTP":
                assert demo.generate(**endless(max_tokens=5), **{CLIENT: "quiet"})[0] == 200
            else:
                with GrpcStream(demo, name="quiet") as stream:
                    stream.send(**endless(max_tokens=5))
                    stream.responses()
            overtaken = len(answered) - before
        finally:
            enough.set()
    assert overtaken <= 24, "in the order of arrival at least 25 would be answered first"
    assert set(answered) == {200}


def test_a_client_that_fills_the_queue_loses_a_place_to_another_client(server: TritonServer) -> None:
    """The queue has room for 2, both from one client. Another client's request replaces the newer one."""
    short = Client(server, "short")
    answers: list[tuple[int, Any]] = []
    with ThreadPoolExecutor(10) as pool:
        for _ in range(10):
            pool.submit(lambda: answers.append(short.generate(**endless(num_draft_tokens=0), **{CLIENT: "flood"})))
        assert eventually(lambda: short.metrics()["tandemrt_requests_waiting"] == 2)
        assert short.generate(**endless(max_tokens=5), **{CLIENT: "quiet"})[0] == 200
    refused = [answer["error"] for status, answer in answers if status != 200]
    assert len(refused) == 1
    assert "queue_limit: at most 2 requests may wait" in refused[0]


def ask(demo: Client, at: int) -> dict[str, Any]:
    inputs = given(at)
    if at % 4 < 2:
        answers = demo.stream(**inputs) if at % 8 < 4 else [demo.generate(**inputs)[1]]
        return {
            "text": "".join(answer["text_output"] for answer in answers),
            "tokens": sum(len(token_ids(answer)) for answer in answers),
        }
    results = demo.grpc(**inputs, stream=at % 8 < 4)
    return {"text": text(results), "tokens": sum(len(result.as_numpy("token_ids")) for result in results)}


def given(at: int) -> dict[str, Any]:
    if at % 2:
        return record_inputs(EXAMPLES[at % len(EXAMPLES)], **way(at))
    return {"text_input": EXAMPLES[at % len(EXAMPLES)].sentence, **way(at)}


def way(at: int) -> dict[str, Any]:
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 60},
        {"temperature": 0.8, "top_p": 0.9, "max_tokens": 60},
        {"temperature": 1.0, "thinking_token_budget": 12, "max_tokens": 70},
        {"temperature": 1.0, "num_draft_tokens": 0, "max_tokens": 30},
        {"temperature": 0.5, "stop": ["e"], "num_draft_tokens": 2, "max_tokens": 40},
    ]
    return {"seed": at, **ways[at % len(ways)]}


def expect(llm: LLM, at: int) -> Any:
    example = EXAMPLES[at % len(EXAMPLES)]
    if at % 2:
        shape = StructuredOutputs(json=example.schema)
        return llm.generate(example.prompt_messages(), SamplingParams(**way(at), structured_outputs=shape))
    return llm.generate(example.sentence, SamplingParams(**way(at)))
