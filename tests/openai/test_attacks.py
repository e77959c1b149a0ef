"""``python -m tools.attack`` in short: what is too large is refused, and a victim's stream is whole."""

import os
from urllib.parse import urlsplit

from tests.openai.client import Served, endless, events
from tools.attack.faces import Http, PythonApi
from tools.attack.measure import attacked
from tools.attack.requests import requests

REFUSED = {  # what is known to be too much at a glance, and what is said of it
    "prompt of 1 MB": "max_prompt_bytes",
    "prompt of 800,000 ids": "at most 511 tokens",
    "chat of 20,000 messages": "messages and tools must hold at most 32768 characters",
    "50,000 stop strings": "at most 256 strings",
    "500,000 banned ids": "banned_token_ids: at most",
    "EBNF: 100,000 rules": "max_grammar_bytes",
    "regex: brackets 5,000 deep": "within more than 64 others",
    "regex: 20,000 words": "at most 32768 bytes",
    "schema: 20,000 properties": "max_grammar_bytes",
}


def test_attackers_are_refused_in_our_words_while_a_victim_streams(served: Served) -> None:
    port = urlsplit(served.url).port
    assert port is not None
    face = Http(port, os.getpid())
    alone = served.ask("/v1/completions", endless())[1]["choices"][0]["text"]
    victim = served.send("/v1/completions", endless(stream=True, user="victim"))
    for name, words in REFUSED.items():
        answer = face.send(requests()[name]())
        assert answer.startswith("refused: "), f"{name}: {answer}"
        assert words in answer, f"{name}: {answer}"
    assert "".join(event["choices"][0]["text"] for event in events(victim.getresponse())) == alone
    victim.close()


def test_an_attack_is_measured(served: Served) -> None:
    face = PythonApi(served.llm, os.getpid())
    found = attacked(face, "one", lambda: face.send({"prompt": "x" * 10_000}), clients=2, limit_s=60.0)
    assert found.answer.startswith("refused: prompt: at most 8192 bytes")
    assert 0 < found.felt.p50 <= found.felt.p99 <= found.felt.longest
    assert found.answered_s is not None
