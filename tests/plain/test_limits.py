"""Limits that are no rule of a record (test_rules.py): the last value is accepted, and one more is rejected."""

from collections.abc import Callable
from typing import Any

import pytest

from tandemrt import SamplingParams, StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars.regex.patterns import search_expression
from tandemrt.runtime.grammars.regex.syntax import UnsupportedPattern
from tandemrt.runtime.grammars.source_cache import SourceCache
from tandemrt.runtime.grammars.sources import schema_of
from tandemrt.runtime.requests.request_size import RequestSize
from tandemrt.runtime.servers.openai.request_body import parse_completion


def size(prompts: int = 1, prompt_tokens: int = 1, max_tokens: int = 1, **sampling: Any) -> None:
    request, params = RequestSize(), SamplingParams(**sampling)
    for _ in range(prompts):
        request.add(params, prompt_tokens, max_tokens)


def nested(levels: int) -> Any:
    schema: Any = True
    for _ in range(levels):
        schema = {"not": schema}
    return schema


def completion(**fields: Any) -> None:
    parse_completion({"prompt": "x", **fields}, {})


# what a number of something does, the most that is accepted, and words of the error for more
LIMITS: dict[str, tuple[Callable[[int], Any], int, str]] = {
    "logit_bias": (lambda n: SamplingParams(logit_bias=dict.fromkeys(range(n), 1.0)), 1024, "at most 1024 tokens"),
    **{
        name: (lambda n, name=name: SamplingParams(**{name: [1] * n}), 262_144, f"{name}: must have at most 262144")
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids")
    },
    "user": (lambda n: completion(user="a" * n), 512, "user: must have at most 512 characters"),
    "request_id": (lambda n: completion(request_id="a" * n), 256, "request_id: must have at most 256 characters"),
    "choices": (lambda n: completion(prompt=["x"] * n, n=2), 64, "at most 128 choices"),
    "listed ids of outputs": (lambda n: size(n=2, banned_token_ids=[1] * n), 1 << 17, "banned_token_ids"),
    "listed ids of prompts": (lambda n: size(prompts=2, allowed_token_ids=[1] * n), 1 << 17, "allowed_token_ids"),
    "listed ids of one output": (lambda n: size(n=1, banned_token_ids=[1] * n), 1 << 18, "banned_token_ids"),
    "logprobs of outputs": (lambda n: size(n=2, logprobs=1, max_tokens=n), 1 << 16, "outputs times max_tokens"),
    "logprobs of prompts": (lambda n: size(prompts=4, logprobs=0, max_tokens=n), 1 << 16, "outputs times max_tokens"),
    "prompt_logprobs": (lambda n: size(prompt_logprobs=0, prompt_tokens=n), 1 << 16, "prompt_logprobs: outputs times"),
    "prompt_logprobs of prompts": (lambda n: size(prompts=n, n=2, prompt_logprobs=3), 1 << 13, "prompt_logprobs"),
    "nested groups": (lambda n: search_expression("(" * n + "a" + ")" * n), 64, "nested groups"),
    "expression": (
        lambda n: SourceCache().read(StructuredOutputs(regex="a" * n)),
        (1 << 15) - 1,
        "at most 32768 bytes",
    ),
    "levels of a schema": (lambda n: schema_of(nested(n), 1 << 18), 63, "at most 64 levels"),
    "bits of a number": (lambda n: schema_of({"minimum": 2**n - 1}, 1 << 18), 1024, r"below 2\^1024"),
    "bytes of a schema": (lambda n: schema_of({"title": "a" * n}, 100), 93, "at most 100 bytes"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_last_number_is_accepted_and_one_more_is_rejected(name: str) -> None:
    use, most, words = LIMITS[name]
    use(most)
    with pytest.raises((BadRequest, UnsupportedPattern), match=words):
        use(most + 1)


def test_the_logprobs_of_one_output_have_no_limit() -> None:
    size(logprobs=20, max_tokens=1 << 20)
