"""The log has a line per request: status, time, tokens and tokens per round."""

import logging

import pytest

from tandemrt import LLM, SamplingParams
from tests.openai.client import Served, endless, events
from tests.waiting import eventually

LOGGER = "tandemrt.runtime.servers.http.access_log"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_completion_is_logged_with_its_figures(
    served: Served, llm: LLM, caplog: pytest.LogCaptureFixture, stream: bool, n: int
) -> None:
    tokens = 11 + stream + 2 * n  # a line of no other request has this number
    outputs = llm.generate("Please send", SamplingParams(ignore_eos=True, seed=1, max_tokens=tokens, n=n)).outputs
    steps = sum(each.speculation.num_spec_steps for each in outputs)
    accepted = sum(each.speculation.num_accepted_draft_tokens for each in outputs)
    with caplog.at_level(logging.INFO, LOGGER):
        connection = served.send("/v1/completions", endless(max_tokens=tokens, n=n, stream=stream))
        answer = connection.getresponse()
        _ = list(events(answer)) if stream else answer.read()
        connection.close()
        end = f" ms {n * tokens} tokens {1 + accepted / steps:.2f} tokens/round"
        assert eventually(lambda: any(each.endswith(end) for each in caplog.messages))
    [line] = [each for each in caplog.messages if each.endswith(end)]
    assert line.startswith("127.0.0.1 POST '/v1/completions' 200 ")


def test_an_error_is_logged_and_a_path_cannot_forge_a_line(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        assert served.ask("/nothing%0A2026")[0] == 404
        assert served.ask("/health")[0] == 200
        assert eventually(lambda: any("nothing" in each for each in caplog.messages))
        assert not any("/health" in each for each in caplog.messages)
    [line] = [each for each in caplog.messages if "nothing" in each]
    assert line.startswith("127.0.0.1 GET '/nothing\\n2026' 404 ")
    assert line.endswith(" ms")
