"""A short run of ``python -m tools.quality.attack``: oversized requests are refused while a stream completes."""

import os
from urllib.parse import urlsplit

from tests.openai.client import Served, endless, events
from tools.quality.attack.frontends import HttpFrontend, PythonFrontend
from tools.quality.attack.measure import measure_attack
from tools.quality.attack.requests import requests

REFUSED = {  # requests that are refused by size alone, and words of the message
    "prompt of 1 MB": "max_prompt_bytes",
    "prompt of 800,000 ids": "at most 511 tokens",
    "chat of 20,000 messages": "at most 65536 texts, lists and objects",
    "chat of 4 MB": "messages and tools hold more than 32768 characters",
    "50,000 stop strings": "at most 256 strings",
    "500,000 banned ids": "banned_token_ids: must have at most",
    "128 outputs with 20 logprobs": "outputs times max_tokens times logprobs + 1",
    "EBNF: 100,000 rules": "max_grammar_bytes",
    "regex: brackets 5,000 deep": "more than 64 nested groups",
    "regex: 20,000 words": "at most 32768 bytes",
    "schema: 20,000 properties": "at most 65536 texts, lists and objects",
}


def test_attackers_are_refused_while_a_victim_streams(served: Served) -> None:
    port = urlsplit(served.url).port
    assert port is not None
    frontend = HttpFrontend(port, os.getpid(), served.llm.bundle.folder)
    alone = served.ask("/v1/completions", endless())[1]["choices"][0]["text"]
    victim = served.send("/v1/completions", endless(stream=True, user="victim"))
    for name, words in REFUSED.items():
        answer = frontend.send(requests()[name]())
        assert answer.startswith("refused: "), f"{name}: {answer}"
        assert words in answer, f"{name}: {answer}"
    assert "".join(event["choices"][0]["text"] for event in events(victim.getresponse())) == alone
    victim.close()


def test_an_attack_is_measured(served: Served) -> None:
    frontend = PythonFrontend(served.llm, os.getpid())
    measured = measure_attack(frontend, "one", lambda: frontend.send({"prompt": "x" * 10_000}), clients=2, limit_s=60.0)
    assert "at most 8192 bytes of text may become tokens" in measured.answer
    assert 0 < measured.gaps.p50 <= measured.gaps.p99 <= measured.gaps.longest
    assert measured.answered_s is not None


def test_an_attack_of_several_outputs_ends_with_the_last_of_them(served: Served) -> None:
    frontend = PythonFrontend(served.llm, os.getpid())
    assert frontend.send({"prompt": "x", "n": 8, "max_tokens": 20, "ignore_eos": True, "seed": 1}) == "length"
    assert (served.llm.waiting, served.llm.running) == (0, 0)
