"""The dashboard in a real browser: its figures are those of the server while it answers requests."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.servers.http import dashboard
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.openai.client import EXAMPLES, Served, asking, endless
from tests.openai.conftest import serving
from tests.waiting import PATIENCE_S, eventually
from tools.browser import BROWSER, Page

KEY = {"authorization": "Bearer a key"}
FIGURES = """Object.fromEntries(
  [...document.querySelectorAll("[data-figure]")].map(each => [each.dataset.figure, each.textContent]))"""
CHARTS = """Object.fromEntries([...document.querySelectorAll("[data-chart]")].map(each => [each.dataset.chart, {
  words: each.querySelector("p").textContent,
  titles: [...each.querySelectorAll("title")].map(title => title.textContent),
}]))"""
TOKENS = '[...document.querySelectorAll("[data-token]")].map(each => Number(each.dataset.token))'


@pytest.fixture(scope="module")
def live(demo_bundle: Path) -> Iterator[Served]:
    config = ServerConfig(port=0, grace_s=10, api_key="a key", dashboard_texts=True)
    with serving(demo_bundle, config, RuntimeOptions(threads=1)) as running:
        yield running


def test_the_page_needs_no_key_and_its_data_does(live: Served) -> None:
    status, page, headers = live.ask("/dashboard")
    assert (status, headers["content-type"], headers["cache-control"]) == (200, "text/html; charset=utf-8", "no-store")
    assert not re.search(r"https?:|//[a-z]", page.replace("http://www.w3.org", "")), "no network"
    assert live.ask("/dashboard/trace")[0] == live.ask("/metrics")[0] == 401
    assert live.ask("/dashboard/trace", headers=KEY)[0] == 200
    status, answer, _ = live.ask("/dashboard/trace?model=other", headers=KEY)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_a_server_without_the_option_shows_figures_and_no_texts(served: Served) -> None:
    assert served.ask("/v1/completions", endless(max_tokens=4))[0] == 200
    assert served.ask("/dashboard")[0] == 200
    assert served.ask("/dashboard/trace")[:2] == (200, {"texts": False, "request": None})


def test_one_request_is_followed_until_its_end(live: Served) -> None:
    before = live.ask("/v1/completions", endless(max_tokens=4, return_token_ids=True), headers=KEY)[1]
    trace = live.ask("/dashboard/trace", headers=KEY)[1]["request"]
    assert [token["id"] for token in trace["tokens"]] == before["choices"][0]["token_ids"]
    assert (trace["finish_reason"], trace["num_tokens"]) == ("length", 4)
    with paused(live, requests=2, tokens=40) as answers:
        first = live.ask("/dashboard/trace", headers=KEY)[1]["request"]
        assert first["finish_reason"] is None
        assert 0 < len(first["tokens"]) == first["num_tokens"]
    assert first["tokens"][0]["id"] == answers[0]["choices"][0]["token_ids"][0]


@pytest.mark.parametrize("shown", [1, 7, 20])
def test_the_newest_tokens_of_a_long_text_are_shown(live: Served, monkeypatch: pytest.MonkeyPatch, shown: int) -> None:
    monkeypatch.setattr(dashboard, "_MOST_TOKENS", shown)
    answer = live.ask("/v1/completions", endless(max_tokens=20, return_token_ids=True), headers=KEY)[1]
    request = live.ask("/dashboard/trace", headers=KEY)[1]["request"]
    assert [token["id"] for token in request["tokens"]] == answer["choices"][0]["token_ids"][-shown:]
    assert request["num_tokens"] == 20


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_shows_the_figures_of_the_server(live: Served) -> None:
    for example in EXAMPLES[:3]:
        assert live.ask("/v1/chat/completions", asking(example, seed=1), headers=KEY)[0] == 200
    slots, before = live.llm.bundle.limits.batch, live.llm.metrics.kept
    with Page() as page:
        page.open(live.url.removesuffix("/v1") + "/dashboard")
        page.wait_for("!$('key').hidden")
        assert page.evaluate("$('state').textContent") == "The server asks for its key."
        page.evaluate("$('secret').value = 'a key', $('key').requestSubmit()")
        page.wait_for("$('state').textContent === 'live'")
        with paused(live, requests=slots + 1, tokens=5 * slots) as answers:
            page.evaluate("poll().then(poll)")  # the second starts after whatever was read before the loop stopped
            figures, charts, tokens = page.evaluate(FIGURES), page.evaluate(CHARTS), page.evaluate(TOKENS)
            now = live.metrics(headers=KEY)
            traced = live.ask("/dashboard/trace", headers=KEY)[1]["request"]
        page.wait_for(f"({FIGURES}).running === '0'")
        assert page.evaluate(CHARTS)["Tokens per second"]["words"].endswith(
            f" {live.llm.metrics.kept - before} tokens since this page was opened."
        )
        _assert_readable_on_a_phone(page)
        assert {error for error in page.errors if "401" not in error} == set()

    accepted = [now[f"tandemrt_accepted_total {at}"] for at in range(1, len(live.llm.metrics.accepted) + 1)]
    steps = now["tandemrt_steps_total"]
    assert sum(accepted)
    assert figures.pop("tokens/s").isdigit()
    per_round = float(figures.pop("tokens per round"))
    assert per_round == pytest.approx(1 + sum(accepted) / steps, abs=0.0051)  # languages round 3.625 otherwise
    assert figures == {
        "running": str(slots),
        "waiting": "1",
        "KV cache in use": "100 %",
        "finished": str(sum(int(value) for name, value in now.items() if name.startswith("tandemrt_finished_total"))),
    }
    assert charts["Drafts accepted, by position"]["titles"] == [
        f"position {at}: {count:.0f} of {steps:.0f} draft windows" for at, count in enumerate(accepted, 1)
    ]
    for chart, name in (
        ("Time to the first token", "tandemrt_time_to_first_token_seconds"),
        ("Time between tokens", "tandemrt_inter_token_seconds"),
    ):
        counts = [int(title.split()[0]) for title in charts[chart]["titles"]]
        assert sum(counts) == now[f"{name}_count"] > 0
        assert 0 not in (counts[0], counts[-1])
    assert tokens == [token["id"] for token in traced["tokens"]]
    assert tokens == answers[0]["choices"][0]["token_ids"][: len(tokens)], "every request has the same seed"
    assert len(tokens) > 1


@contextmanager
def paused(live: Served, *, requests: int, tokens: int) -> Iterator[list[Any]]:
    """Send equal requests and stop the engine loop when all were submitted and ``tokens`` are written.

    The answers are in the list after the block.
    """
    metrics, llm = live.llm.metrics, live.llm
    reached, resume, enough = threading.Event(), threading.Event(), metrics.kept + tokens

    def stop(phase: str, _start: float, _end: float) -> None:  # the engine loop calls this
        assert eventually(lambda: llm.running + llm.waiting == requests)
        if phase == "commit" and metrics.kept >= enough:
            reached.set()
            resume.wait(PATIENCE_S)
            metrics.listener = None

    metrics.listener = stop
    answers: list[Any] = []
    body = endless(return_token_ids=True, max_tokens=60)
    sent = [live.send("/v1/completions", body, headers=KEY) for _ in range(requests)]
    try:
        assert reached.wait(PATIENCE_S)
        yield answers
    finally:
        resume.set()
        for connection in sent:
            answers.append(json.loads(connection.getresponse().read()))
            connection.close()


def _assert_readable_on_a_phone(page: Page) -> None:
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.call("Emulation.setDeviceMetricsOverride", **phone)
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    page.call("Emulation.setEmulatedMedia", features=[dark])
    assert page.evaluate("document.documentElement.scrollWidth") <= phone["width"]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
