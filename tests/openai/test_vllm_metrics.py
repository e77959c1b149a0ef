"""Metrics of the server: all that vLLM's Grafana dashboard reads, equal to those of the runtime since its warm-up."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandemrt import SamplingParams
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.servers.http.metrics import metrics_registry
from tandemrt.runtime.servers.http.server import open_models
from tests.openai.client import EXAMPLES, Served, asking

BOARD = [
    line
    for line in (Path(__file__).parent / "data" / "vllm_dashboard.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
]


Samples = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture(scope="module")
def samples(served: Served) -> Samples:
    """Labels and value of every series at /metrics by name, after a few requests."""
    return samples_after_requests(served)


def samples_after_requests(served: Served) -> Samples:
    for example in EXAMPLES[:2]:
        assert served.ask("/v1/chat/completions", asking(example, seed=1))[0] == 200
    assert served.ask("/v1/completions", {"prompt": "Please", "max_tokens": 3, "n": 2, "ignore_eos": True})[0] == 200
    by_name: Samples = {}
    for family in text_string_to_metric_families(served.ask("/metrics")[1]):
        for sample in family.samples:
            by_name.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return by_name


@pytest.mark.parametrize("name", BOARD)
def test_every_series_of_the_board_has_a_value(name: str, samples: Samples) -> None:
    assert {labels["model_name"] for labels, _ in samples[name]} == {"demo"}
    if name.startswith("vllm:num_requests") or name == "vllm:kv_cache_usage_perc":
        assert [value for _, value in samples[name]] == [0]  # no request runs
    else:
        assert sum(value for _, value in samples[name]) > 0


def test_requests_count_once_by_reason_and_length(served: Served, samples: Samples) -> None:
    after = samples_after_requests(served)

    def total(name: str) -> float:
        """What the requests between the two readings added. Other tests cancel requests before their first token."""
        return sum(value for _, value in after[name]) - sum(value for _, value in samples[name])

    by_reason = {labels["finished_reason"]: value for labels, value in after["vllm:request_success_total"]}
    assert by_reason == {labels["reason"]: value for labels, value in after["tandemrt_finished_total"]}
    finished = total("vllm:request_success_total")
    assert finished == 4
    for name in ("e2e_request_latency_seconds", "request_generation_tokens", "request_max_num_generation_tokens"):
        assert total(f"vllm:{name}_count") == finished
    assert total("vllm:request_generation_tokens_sum") == total("vllm:generation_tokens_total")
    assert total("vllm:request_prompt_tokens_sum") == total("vllm:prompt_tokens_total")
    times = [total(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert sum(times) == pytest.approx(total("vllm:e2e_request_latency_seconds_sum"), abs=1e-6)
    first = total("vllm:time_to_first_token_seconds_sum")
    assert times[0] + times[1] == pytest.approx(first, abs=1e-6)


def test_the_warm_up_of_a_server_is_not_counted(demo_bundle: Path) -> None:
    with open_models({"demo": demo_bundle}, RuntimeOptions(threads=1)) as models:
        registry = metrics_registry(models.llms)
        # The round that ended the warm-up may add its host time meanwhile.
        counted = [(sample.name, sample.value) for family in registry.collect() for sample in family.samples]
        assert [name for name, value in counted if value and not name.startswith("tandemrt_seconds_")] == []
        models.llms["demo"].generate("a", SamplingParams(max_tokens=3, ignore_eos=True))
        labels = {"model": "demo", "reason": "length"}
        assert registry.get_sample_value("tandemrt_finished_total", labels) == 1
        assert registry.get_sample_value("tandemrt_output_tokens_sum", {"model": "demo"}) == 3
