"""The size of an answer adds up over prompts and outputs, and the largest part of it is named."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandemrt import SamplingParams
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.servers.openai.answer_size import AnswerSize

LOGPROB, ID = 80, 7


def sizes(limit: int, prompts: list[Any], *, stream: bool = False, **fields: Any) -> AnswerSize:
    more = {"echo": False, "return_token_ids": False} | {
        k: fields.pop(k) for k in ("echo", "return_token_ids") if k in fields
    }
    parsed = SimpleNamespace(prompts=prompts, params=SamplingParams(**fields), stream=stream, **more)
    return AnswerSize(cast("Any", parsed), limit)


def queued(prompt: int, **fields: Any) -> Any:
    return SimpleNamespace(params=SamplingParams(**fields), prompt=[0] * prompt, max_tokens=10)


# Two prompts of 3 and 5 tokens and different texts, at most 10 tokens of output each.
@pytest.mark.parametrize(
    ("fields", "total", "largest"),
    [
        ({"n": 2, "logprobs": 4}, 2 * 2 * LOGPROB * 10 * 5, "logprobs"),
        ({"n": 2, "logprobs": 0}, 2 * 2 * LOGPROB * 10, "logprobs"),
        ({"prompt_logprobs": 2}, LOGPROB * (3 + 5) * 3, "prompt_logprobs"),
        ({"n": 2, "prompt_logprobs": 0}, 2 * LOGPROB * (3 + 5), "prompt_logprobs"),
        ({"return_token_ids": True}, ID * (3 + 10 + 5 + 10), "return_token_ids"),
        ({"n": 3, "echo": True}, 3 * (2 + 4), "echo"),
        ({"logprobs": 0, "prompt_logprobs": 0, "echo": True}, LOGPROB * (2 * 10 + 3 + 5) + 2 + 4, "logprobs"),
    ],
)
def test_an_answer_may_be_as_large_as_its_limit_and_no_larger(fields: dict[str, Any], total: int, largest: str) -> None:
    params = {name: value for name, value in fields.items() if name not in ("echo", "return_token_ids")}
    for limit in (total, total - 1):
        size = sizes(limit, ["ab", "cdef"], **fields)
        size.add(queued(3, **params))
        if limit == total:
            size.add(queued(5, **params))
            continue
        with pytest.raises(BadRequest, match=rf"^{largest}: .* at most {limit} bytes .* about {total};"):
            size.add(queued(5, **params))


@pytest.mark.parametrize(
    ("stream", "max_tokens", "at_first", "at_the_end"),
    [(False, 10, True, False), (False, None, False, True), (True, 10, False, False), (True, None, False, False)],
)
def test_logprobs_of_one_output_are_counted_before_it_or_when_it_is_whole(
    stream: bool, max_tokens: int | None, at_first: bool, at_the_end: bool
) -> None:
    params = {"logprobs": 1} | ({} if max_tokens is None else {"max_tokens": max_tokens})
    size = sizes(LOGPROB * 5 - 1, ["ab"], stream=stream, **params)
    if at_first:
        with pytest.raises(BadRequest, match=r"^logprobs: "):
            size.add(queued(3, **params))
        return
    size.add(queued(3, **params))
    tokens = [SimpleNamespace(top=["a"]), SimpleNamespace(top=["a", "b"])]  # five values
    output: Any = SimpleNamespace(logprobs=tokens)
    if at_the_end:
        with pytest.raises(
            BadRequest, match=rf"^logprobs: .* about {LOGPROB * 5}; .* tokens by max_tokens, or a stream"
        ):
            size.count(output)
    else:
        size.count(output)
