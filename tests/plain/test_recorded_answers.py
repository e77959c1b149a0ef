"""What the protocols of servers say of drawn outputs, complete and as streams: equal to the recorded."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from tandemrt import SamplingParams
from tandemrt.runtime.servers.anthropic.answer import MessageFormatter
from tandemrt.runtime.servers.openai import formatters
from tandemrt.runtime.servers.openai.formatters import ChatFormatter, CompletionFormatter
from tandemrt.runtime.servers.openai.protocol import StreamOptions
from tandemrt.runtime.servers.openai.request_body import CompletionRequest
from tandemrt.runtime.servers.openai.responses_answer import ResponsesFormatter
from tests.plain.test_openai_choices import CALL, TOKENIZER
from tests.plain.test_streams_and_answers import PROMPT, SPEC, deltas_of, ordered, outputs_of, token_text
from tests.recorded import require_recorded

FORMATTERS: dict[str, Any] = {
    "completion": CompletionFormatter, "chat": ChatFormatter, "response": ResponsesFormatter,
    "message": MessageFormatter,
}  # fmt: skip
TEXTS = ("", "a", " ", CALL, CALL[:3], CALL[:14], f"b{CALL}")
ENDS = (
    ("stop", None, None), ("stop", "half", None), ("stop", 7, None), ("length", None, None), ("timeout", None, None),
    ("constraint", None, "E"),
)  # fmt: skip
_DRAWN = re.compile(r'[0-9a-f]{24}|(?<=id": ")[A-Za-z0-9]{9}(?=")|(?<="created)(_at)?": ?\d+')  # ids and times


def said(draw: random.Random, name: str) -> Iterator[str]:
    """The complete answer to a drawn request, then the chunks of its stream."""

    def either() -> bool:
        return draw.random() < 0.5

    several, logprobs = name in ("completion", "chat"), name in ("completion", "chat") and either()
    waiting = []
    for index in range(draw.randint(1, 3) if several else 1):
        thought = [(draw.choice(["", "so "]), "", draw.randint(0, 2)) for _ in range(draw.randint(0, 2))]
        texts = [("", draw.choice(TEXTS), draw.randint(0, 2)) for _ in range(draw.randint(1, 3))]
        waiting.append(deltas_of(index, ordered(thought, texts, late=either()), draw.choice(ENDS), logprobs=logprobs))
    request = CompletionRequest(
        model=None,
        prompt=PROMPT,
        params=SamplingParams(n=len(waiting), logprobs=1 if logprobs else None),
        stream=True,
        stream_options=StreamOptions(include_usage=either(), continuous_usage_stats=either()),
        tool_calls=SPEC if name != "completion" and either() else None,
        return_token_ids=either(),
        include_reasoning=draw.random() < 0.8,
        echo=name == "completion" and not logprobs and either(),
        request_id="r" if either() else None,
        warnings=("w",) if either() else (),
        repeated={"metadata": {}} if name == "response" else {},
    )
    complete, stream = (FORMATTERS[name](request, "m", TOKENIZER) for _ in range(2))
    yield json.dumps(complete.complete(outputs_of([each for deltas in waiting for each in deltas])))
    while any(waiting):
        delta = draw.choice([each for each in waiting if each]).pop(0)
        text = stream.text_chunk(delta) if several else None
        yield json.dumps(stream.chunks([delta], 3)) if text is None else text


@pytest.mark.parametrize("name", FORMATTERS)
def test_answers_are_as_before(name: str) -> None:
    with patch.object(formatters, "token_text", token_text):
        answers = [answer for seed in range(60) for answer in said(random.Random(seed), name)]
    require_recorded(f"answer/{name}", (_DRAWN.sub("…", answer) for answer in answers))
