"""The trace of a real bundle: its page shows the tokens of the output and works without a network."""

import json
import re
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM, RequestOutput, SamplingParams
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.metrics.metrics import PHASES
from tests.engine.test_invisible import REQUESTS, open_llm, output_of
from tests.waiting import PATIENCE_S
from tools.browser import BROWSER

ASKED = [*REQUESTS, ("the end </script>", {"rule": "rejection", "temperature": 1.0, "seed": 9, "max_tokens": 20})]


# A path of a user, which the page's title shows.
KEYS = """
const spans = [...document.querySelectorAll("[data-token]")], went = [];
spans[0].focus();
for (const key of ["ArrowRight", "ArrowDown", "End", "Home"]) {
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  went.push(spans.indexOf(document.activeElement));
}
document.title = "went=" + went + ";";
"""


def generate(bundle: Path, trace: Path | None, asked: list[Any] = ASKED, **options: Any) -> list[RequestOutput]:
    with open_llm(bundle, trace=trace, **options) as llm:
        return llm.generate([prompt for prompt, _ in asked], [SamplingParams(**params) for _, params in asked])


@pytest.fixture(scope="module")
def outputs(tiny_bundle: Path) -> list[RequestOutput]:
    return generate(tiny_bundle, None, overlap=True, lookup=False)  # which copies depends on the clock


@pytest.fixture(scope="module")
def page(tiny_bundle: Path, outputs: list[RequestOutput], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of requests of every kind. Tracing changes no text."""
    place = tmp_path_factory.mktemp("trace") / "out.html"
    traced = generate(tiny_bundle, place, overlap=True, lookup=False)
    assert list(map(output_of, traced)) == list(map(output_of, outputs))
    return place


def read(page: Path) -> list[dict[str, Any]]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"))
    assert match
    return json.loads(match[1])["requests"]


def test_the_tokens_of_the_page_are_those_of_the_outputs(page: Path, outputs: list[RequestOutput]) -> None:
    for request, output in zip(read(page), outputs, strict=True):
        assert [token["id"] for token in request["tokens"]] == output.token_ids
        assert request["speculation"] == output.speculation.to_json()
        accepted = [min(each["accepted"], each["kept"]) for each in request["rounds"] if each["passed"]]
        assert sum(accepted) >= output.speculation.num_accepted_draft_tokens
        assert all(each["ms"] > 0 for each in request["rounds"])


def test_tokens_of_a_spent_budget_are_as_long_as_their_forced_ends(page: Path, outputs: list[RequestOutput]) -> None:
    assert any(output.forced_ends for output in outputs)
    for request, output in zip(read(page), outputs, strict=True):
        forced = [token for token in request["tokens"] if token["source"] == "budget"]
        assert bool(forced) == (output.forced_ends > 0)
        assert all(token["allowed"] == 1 for token in forced)


def test_a_text_of_choices_has_fast_forward_tokens(page: Path) -> None:
    assert any(token["source"] == "grammar" for request in read(page) for token in request["tokens"])


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_shows_the_tokens_without_errors(page: Path, outputs: list[RequestOutput]) -> None:
    pressing = page.with_name("pressing.html")
    pressing.write_text(page.read_text("utf-8").replace("</body>", f"<script>{KEYS}</script></body>"), "utf-8")
    dom, log = render(pressing)
    assert "CONSOLE" not in log
    rounds = [token["round"] for token in read(page)[0]["tokens"]]
    to_a_round = rounds.index(rounds[1] + 1)
    assert f"went=1,{to_a_round},{len(rounds) - 1},0;" in dom
    assert re.search(r"token 1 of \d+, id \d+; .*; round 1, [\d.]+ ms", dom), "every token has a description"
    shown = PageReader()
    shown.feed(dom)
    assert shown.tokens == outputs[0].token_ids, "of the first request, which a page begins with"
    assert shown.options == len(outputs)
    speculation = outputs[0].speculation
    drafts = speculation.num_accepted_draft_tokens, speculation.num_draft_tokens
    assert f"{drafts[0]} of {drafts[1]} verified drafts were accepted" in dom
    bars = [tuple(map(int, each)) for each in re.findall(r">(\d+) of (\d+)</text>", dom)]
    assert tuple(map(sum, zip(*bars, strict=True))) == drafts, "the bars are the drafts of the sentence"
    assert not re.search(r"https?:|//[a-z]", page.read_text("utf-8").split('id="data"')[0]), "no network"


def render(page: Path) -> tuple[str, str]:
    """Return what a headless browser renders and logs."""
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    command = [BROWSER, *flags, f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return done.stdout, done.stderr


class PageReader(HTMLParser):
    """Reads the tokens of the text, and the number of selectable requests."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.options = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.options += tag == "option"
        if attributes.get("data-token") is not None:
            self.tokens.append(int(str(attributes["data-token"])))


def test_a_chrome_trace_has_host_steps_and_rounds_of_every_request(tiny_bundle: Path, tmp_path: Path) -> None:
    generate(tiny_bundle, tmp_path / "out.json", ASKED[3:6])
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {*PHASES} - {"draft_prompts"} <= {event["name"] for event in complete}
    assert {event["tid"] for event in complete if event["pid"] == 2} == {0, 1, 2}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    host = [event for event in complete if event["pid"] == 1]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in pairwise(host)), "one after the other"
    assert 0 <= host[0]["ts"] < 1e5, "times count from the first step"


@pytest.mark.parametrize("name", ["out.txt", "missing/out.html", "."])
def test_an_unwritable_trace_path_is_rejected_before_the_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest, match=r"trace: must .* name another file"):
        LLM(tmp_path / "a-bundle-that-does-not-exist", trace=tmp_path / name)
