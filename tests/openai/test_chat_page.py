"""The chat page in a real browser, on a server with a key and two models."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.openai.client import EXAMPLES, Served
from tests.openai.conftest import serving
from tests.waiting import PATIENCE_S, eventually
from tools.browser import BROWSER, Page

KEY = {"authorization": "Bearer a key"}
QUESTION = str(EXAMPLES[0].prompt_messages()[-1]["content"])
ANSWERS = """[...document.querySelectorAll("article.assistant")].map(answer => ({
  text: answer.querySelector(":scope > .text").textContent,
  reasoning: answer.querySelector("details .text").textContent,
  folded: !answer.querySelector("details").open,
  tokens: [...answer.querySelectorAll("[data-token]")].map(token => Number(token.dataset.token)),
  sources: [...answer.querySelectorAll("[data-token]")].map(token => token.classList[1]),
  legend: [...answer.querySelectorAll(".legend li")].map(entry => entry.textContent),
  about: [...answer.querySelectorAll(":scope > p")].map(line => line.textContent).join(),
}))"""
browser = pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")


@pytest.fixture(scope="module")
def locked(demo_bundle: Path) -> Iterator[Served]:
    config = ServerConfig(port=0, grace_s=10, api_key="a key")
    with serving({"demo": demo_bundle, "other": demo_bundle}, config, RuntimeOptions(threads=1)) as running:
        yield running


@contextmanager
def opened(server: Served, key: str | None = None) -> Iterator[Page]:
    with Page() as page:
        page.open(server.url.removesuffix("v1"))
        if key is not None:
            page.wait_for("!$('key').hidden")
            page.evaluate(f"$('secret').value = {key!r}, $('key').requestSubmit()")
        page.wait_for("$('state').className === 'live'")
        yield page


def say(page: Page, text: str) -> Any:
    """Send a message and return the last answer when it has ended."""
    page.evaluate(f"$('text').value = {text!r}, $('ask').requestSubmit()")
    page.wait_for("running === null")
    return page.evaluate(ANSWERS)[-1]


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_a_page_needs_no_key_and_may_load_nothing(locked: Served, path: str) -> None:
    status, page, headers = locked.ask(path)
    assert (status, headers["content-type"], headers["cache-control"]) == (200, "text/html; charset=utf-8", "no-store")
    assert not re.search(r"https?:|//[a-z]", page.replace("http://www.w3.org", "")), "no network"
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy.pop("connect-src") == "'self'"
    assert policy.pop("img-src") == "'self' data:"
    assert {name for name, value in policy.items() if value != "'none'"} == {"script-src", "style-src"}
    assert all(policy[name].startswith("'sha256-") for name in ("script-src", "style-src"))


@browser
def test_a_chat_streams_the_answer_with_the_source_of_every_token(served: Served) -> None:
    with opened(served) as page:
        page.evaluate("$('temperature').value = 0, $('system').value = 'Be short.'")
        answer = say(page, QUESTION)
        sent = [{"role": "system", "content": "Be short."}, {"role": "user", "content": QUESTION}]
        body = {"messages": sent, "temperature": 0, "return_token_ids": True}
        expected = served.ask("/v1/chat/completions", body)[1]["choices"][0]
        assert answer["tokens"] == expected["token_ids"][:-1], "all but the one that ends the text"
        assert answer["text"] == expected["message"]["content"]
        assert answer["folded"]
        reasoning = answer["reasoning"].replace("↵", "")
        assert reasoning.startswith(expected["message"]["reasoning"])
        assert {"accepted", "bonus"} <= set(answer["sources"])
        assert sum(int(line.rsplit(" ", 1)[1]) for line in answer["legend"]) == len(answer["tokens"])
        assert f"{len(expected['token_ids'])} tokens in" in answer["about"]
        assert "finish: stop, seed: " in answer["about"]
        history = page.evaluate("messages")
        assert history == [sent[1], {"role": "assistant", "content": expected["message"]["content"]}]
        assert say(page, "Two boxes.")["tokens"]
        page.evaluate("$('sources').click()")
        border = "getComputedStyle(document.querySelector('[data-token]')).borderBottomWidth"
        assert page.evaluate(border) == "0px"
        loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => new URL(entry.name).host)")
        assert set(loaded) == {page.evaluate("location.host")}
        assert page.errors == []


@browser
def test_a_seed_of_the_page_gives_the_same_answer_in_the_api(served: Served) -> None:
    with opened(served) as page:
        answer = say(page, QUESTION)
    seed = int(answer["about"].rsplit("seed: ", 1)[1])
    body = {"messages": [{"role": "user", "content": QUESTION}], "seed": seed, "return_token_ids": True}
    assert answer["tokens"] == served.ask("/v1/chat/completions", body)[1]["choices"][0]["token_ids"][:-1]


@browser
def test_stop_ends_the_request_and_keeps_what_was_written(served: Served) -> None:
    with opened(served) as page, paused_after(served, tokens=8):
        page.evaluate(f"$('text').value = {QUESTION!r}, $('ask').requestSubmit()")
        page.wait_for("document.querySelectorAll('[data-token]').length >= 4")
        cancelled = served.llm.metrics.finished.get("cancelled", 0)
        assert page.evaluate("[$('send').hidden, $('stop').hidden]") == [True, False]
        page.evaluate("$('stop').click()")
        page.wait_for("running === null")
        [answer] = page.evaluate(ANSWERS)
        assert answer["about"].startswith(f"stopped, {len(answer['tokens'])} tokens")
    assert eventually(lambda: served.llm.metrics.finished.get("cancelled", 0) == cancelled + 1)


@browser
def test_a_rejected_message_shows_the_error_and_stays_where_it_was_typed(served: Served) -> None:
    with opened(served) as page:
        long = "box " * 4000
        page.evaluate(f"$('text').value = {long!r}, $('ask').requestSubmit()")
        page.wait_for("running === null")
        alert = page.evaluate("document.querySelector('[role=alert]').textContent")
        rejected = served.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": long.strip()}]})[1]
        assert alert == rejected["error"]["message"]
        assert page.evaluate("$('text').value") == long.strip()
        assert page.evaluate("$('text').style.height === $('text').scrollHeight + 2 + 'px'"), "all of it is in view"
        assert page.evaluate("messages") == []
        assert say(page, QUESTION)["tokens"]
        assert page.evaluate("document.querySelectorAll('[role=alert]').length") == 0


@browser
def test_a_message_that_is_sent_before_the_models_are_known_is_answered(served: Served) -> None:
    with opened(served) as page:
        page.evaluate("$('model').replaceChildren()")
        assert say(page, QUESTION)["text"]


@browser
def test_the_page_asks_for_the_key_and_offers_every_model(locked: Served) -> None:
    with opened(locked, key="a key") as page:
        assert page.evaluate("[...$('model').options].map(option => option.value)") == ["demo", "other"]
        assert not page.evaluate("$('models').hidden")
        page.evaluate("$('model').value = 'other'")
        before = locked.llms["other"].metrics.kept
        assert say(page, QUESTION)["text"]
        assert locked.llms["other"].metrics.kept > before
        page.evaluate("sessionStorage.setItem('tandemrt-key', 'a wrong key')")
        page.evaluate("$('text').value = 'Two boxes.', $('ask').requestSubmit()")
        page.wait_for("running === null && !$('key').hidden")
        assert page.evaluate("$('text').value") == "Two boxes."
        assert {error for error in page.errors if "401" not in error} == set()


@browser
def test_the_policy_blocks_requests_to_other_hosts_and_foreign_scripts(served: Served) -> None:
    with opened(served) as page:
        blocked = """new Promise(resolve => {
          document.addEventListener("securitypolicyviolation", event => resolve(event.effectiveDirective));
          %s
        })"""
        assert page.evaluate(blocked % "fetch('http://127.0.0.2:9/').catch(() => 0)") == "connect-src"
        script = "Object.assign(document.createElement('script'), {textContent: 'window.bad = 1'})"
        assert page.evaluate(blocked % f"document.body.append({script})") == "script-src-elem"
        assert page.evaluate("window.bad") is None


@browser
def test_the_page_fits_a_phone_in_the_dark(served: Served) -> None:
    with opened(served) as page:
        phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        page.call("Emulation.setDeviceMetricsOverride", **phone)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        say(page, QUESTION)
        page.evaluate("$('settings').open = true, document.querySelector('article details').open = true")
        assert page.evaluate("document.documentElement.scrollWidth") <= phone["width"]
        assert page.evaluate("$('ask').getBoundingClientRect().bottom") <= phone["height"]
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"


@contextmanager
def paused_after(server: Served, *, tokens: int) -> Iterator[None]:
    """Stop the engine loop when the next ``tokens`` are written, until the end of the block."""
    metrics, resume = server.llm.metrics, threading.Event()
    enough = metrics.kept + tokens

    def stop(phase: str, _start: float, _end: float) -> None:  # the engine loop calls this
        if phase == "fill" and metrics.kept >= enough:
            resume.wait(PATIENCE_S)

    metrics.listener = stop
    try:
        yield
    finally:
        resume.set()
        metrics.listener = None
