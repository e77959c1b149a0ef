"""A server of two models: requests, metrics and health are told apart; and a small limit of bodies, to the byte."""

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandemrt import LLM
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.runtime.metrics.names import counters, histograms
from tandemrt.runtime.servers.http import server
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.openai.client import Served
from tests.openai.conftest import serving
from tests.waiting import eventually

MAX_BODY = 1000
PATHS = ["/v1/completions", "/v1/chat/completions"]


@pytest.fixture(scope="module")
def both(demo_bundle: Path, tiny_bundle: Path) -> Iterator[Served]:
    models = {"demo": demo_bundle, "tiny": tiny_bundle}
    with serving(models, ServerConfig(port=0, max_body=MAX_BODY), RuntimeOptions(threads=1)) as running:
        yield running


def test_the_log_says_which_model_is_about_to_open(
    demo_bundle: Path, tiny_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tandemrt")
    folders = {"tiny": tiny_bundle, "demo": demo_bundle.with_name("missing")}
    with pytest.raises(BadBundle, match="missing"), server.open_models(folders, RuntimeOptions(threads=1)):
        pass
    lines = [line for line in caplog.messages if line.startswith("opening")]
    assert lines == [f"opening {name}: {folder}" for name, folder in folders.items()]


def test_only_a_server_of_one_bundle_warms_up_later(
    demo_bundle: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, no bundle may open while another one captures graphs."""
    later: list[bool] = []

    class Noted(LLM):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            later.append(options["warm_up_later"])
            super().__init__(*arguments, **options)

    monkeypatch.setattr(server, "LLM", Noted)
    for folders in ({"tiny": tiny_bundle}, {"demo": demo_bundle, "tiny": tiny_bundle}):
        with server.open_models(folders, RuntimeOptions(threads=1)):
            pass
    assert later == [True, False, False]


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "x"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "x"}]}
    return {**prompt, "max_tokens": 2, **fields}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", [{}, {"model": None}, {"model": ""}, {"model": "other"}, {"model": "Demo"}])
def test_a_request_must_name_one_of_several_models(both: Served, path: str, fields: dict[str, Any]) -> None:
    status, answer, _ = both.ask(path, body(path, **fields))
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert answer["error"]["message"] == (f"model: must be one of demo, tiny, received {fields.get('model')!r}")


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_the_named_model_answers(both: Served, name: str) -> None:
    before = {each: llm.metrics.copy() for each, llm in both.llms.items()}
    status, answer, _ = both.ask("/v1/completions", body("/v1/completions", model=name, max_tokens=3, ignore_eos=True))
    assert (status, answer["model"], answer["usage"]["completion_tokens"]) == (200, name, 3)
    kept = {each: llm.metrics.since(before[each]).kept for each, llm in both.llms.items()}
    assert kept == dict.fromkeys(both.llms, 0) | {name: 3}


def test_every_model_has_its_own_card(both: Served) -> None:
    cards = both.ask("/v1/models")[1]["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("demo", 512), ("tiny", 96)]
    for card in cards:
        assert both.ask(f"/v1/models/{card['id']}")[:2] == (200, card)


def samples(served: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(served.ask("/metrics")[1])
        for sample in family.samples
    }


def test_metrics_have_every_value_of_every_model(both: Served) -> None:
    for count, name in enumerate(("demo", "tiny"), start=1):
        for _ in range(count):
            asked = body(PATHS[0], model=name, max_tokens=7, ignore_eos=True)
            assert both.ask(PATHS[0], asked)[0] == 200
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def counted() -> list[Any]:
        metrics = [llm.metrics.traffic for llm in both.llms.values()]
        return [(list(counters(each)), [(h.sum, list(h.counts)) for _, h in histograms(each)]) for each in metrics]

    def nothing_is_counted_meanwhile() -> bool:  # a loop goes on counting after the last answer
        before = counted()
        values.update(samples(both))
        return before == counted()

    assert eventually(nothing_is_counted_meanwhile)
    for name, llm in both.llms.items():
        label = ("model", name)
        for (metric, labels), value in counters(llm.metrics.traffic):
            assert values[metric, tuple(sorted((label, *labels)))] == value
        for metric, histogram in histograms(llm.metrics.traffic):
            assert values[f"{metric}_sum", (label,)] == pytest.approx(histogram.sum)
            assert values[f"{metric}_count", (label,)] == histogram.count
            bounds = [*map(str, histogram.buckets), "+Inf"]
            for bound, total in zip(bounds, accumulate(histogram.counts), strict=True):
                assert values[f"{metric}_bucket", (("le", bound), label)] == total
        assert values["tandemrt_requests_running", (label,)] == values["tandemrt_requests_waiting", (label,)] == 0
    tokens = "tandemrt_time_to_first_token_seconds"
    assert 0 < values[f"{tokens}_sum", (("model", "demo"),)] != values[f"{tokens}_sum", (("model", "tiny"),)] > 0


@pytest.mark.parametrize("length", [MAX_BODY - 1, MAX_BODY])
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_may_have_exactly_the_limit(both: Served, length: int, announced: bool) -> None:
    text = json.dumps(body(PATHS[0], model="demo")).encode()
    sent = text + b" " * (length - len(text))
    with closing(both.connect()) as connection:
        parts = sent if announced else iter((sent[:400], sent[400:-1], sent[-1:]))
        connection.request("POST", PATHS[0], parts, {"Content-Type": "application/json"}, encode_chunked=not announced)
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["usage"]["completion_tokens"]) == (200, 2)


def test_an_announced_body_of_one_byte_more_is_refused(both: Served) -> None:
    with closing(both.connect()) as connection:
        connection.putrequest("POST", PATHS[0])
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(MAX_BODY + 1))
        connection.endheaders()  # without the body: the server may hang up before it has come
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
        assert (answer.status, error["code"]) == (413, "request_too_large")
        assert f"at most {MAX_BODY} bytes" in error["message"]


def test_a_chunked_body_of_one_byte_more_is_refused(both: Served) -> None:
    with closing(both.connect()) as connection:
        connection.putrequest("POST", PATHS[0])
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        connection.send(b"%x\r\n" % (MAX_BODY + 1) + b" " * (MAX_BODY + 1) + b"\r\n")  # and no end
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("closed", [("tiny",), ("demo", "tiny")])
def test_health_names_every_closed_model(demo_bundle: Path, tiny_bundle: Path, closed: tuple[str, ...]) -> None:
    models = {"demo": demo_bundle, "tiny": tiny_bundle}
    with serving(models, ServerConfig(port=0), RuntimeOptions(threads=1)) as served:
        assert served.ask("/health")[:2] == (200, {"status": "ok", "closed": []})
        for name in closed:
            served.llms[name].close()
        assert served.ask("/health")[:2] == (503, {"status": "closed", "closed": list(closed)})
        for name in served.llms:
            status = served.ask(PATHS[0], body(PATHS[0], model=name))[0]
            assert status == (503 if name in closed else 200)
