"""What answers look like: OpenAI's objects, whole and in chunks, with what vLLM's and our own clients read beside them.

OpenAI's finish reasons are fewer than ours, which is in ``native_finish_reason``: a timeout is "length", and a text
that its constraint let no further, or that failed its check, is "content_filter", so that nobody parses it.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.outputs import RequestOutput
from tandemrt.runtime.serve.ask import Ask
from tandemrt.runtime.serve.reply import Piece
from tandemrt.runtime.serve.tools import Calls, Delta

_FINISH = {"timeout": "length", "constraint": "content_filter"}


class Shape:
    """The answer of one request to /v1/completions."""

    object = chunk_object = "text_completion"
    prefix = "cmpl"

    def __init__(self, ask: Ask, model: str, spell: Callable[[int], str]) -> None:
        self._ask = ask
        self._spell = spell
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._tokens = 0  # told

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The answer that is not a stream."""
        choice = self._message(output)
        if output.logprobs is not None:
            choice["logprobs"] = self._logprobs(output.logprobs)
        choice |= _end(output, called=self._called)
        return {**self._head, "object": self.object, "choices": [choice], "usage": usage(output)}

    def chunks(self, piece: Piece, prompt_tokens: int) -> list[dict[str, Any]]:
        """What ``piece`` adds to a stream; with the last piece its end, and the usage if it was asked for."""
        self._tokens += piece.tokens
        choices = self._choices(piece)
        if piece.output is not None:
            end = _end(piece.output, called=self._called)
            choices = [*choices[:-1], {**choices[-1], **end}] if choices else [self._choice("", "") | end]
        so_far = usage(piece.output) if piece.output else _counts(prompt_tokens, self._tokens)
        more = {"usage": so_far if self._ask.usage.continuous_usage_stats else None} if self._tells_usage else {}
        chunks = [{**self._head, "object": self.chunk_object, "choices": [choice], **more} for choice in choices]
        if piece.output is not None and self._ask.usage.include_usage:
            chunks.append({**self._head, "object": self.chunk_object, "choices": [], "usage": usage(piece.output)})
        return chunks

    @property
    def _tells_usage(self) -> bool:
        return self._ask.usage.include_usage or self._ask.usage.continuous_usage_stats

    @property
    def _called(self) -> bool:
        return False

    def _message(self, output: RequestOutput) -> dict[str, Any]:
        return self._choice(output.text, output.reasoning)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        texts = [self._spell(each.token) for each in logprobs]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(each.logprob) for each in logprobs],
            "top_logprobs": [{self._spell(token): logprob for token, logprob in each.top} for each in logprobs],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
        }

    def _choices(self, piece: Piece) -> list[dict[str, Any]]:
        return [self._choice(piece.text, piece.reasoning)] if piece.text or piece.reasoning else []

    def _choice(self, text: str, reasoning: str) -> dict[str, Any]:
        return {"index": 0, "text": text, **_reasoning(reasoning), "logprobs": None, "finish_reason": None}


class ChatShape(Shape):
    """The answer of one request to /v1/chat/completions."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, ask: Ask, model: str, spell: Callable[[int], str]) -> None:
        super().__init__(ask, model, spell)
        self._calls = None if ask.calls is None else Calls(ask.calls)
        self._begun = False

    @property
    def _called(self) -> bool:
        return self._calls is not None and bool(self._calls.whole)

    def _message(self, output: RequestOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        if self._calls is not None:
            self._calls.add(output.text)
            message |= {"content": None, "tool_calls": [_call(each) for each in self._calls.whole]}
        return {"index": 0, "message": message | _reasoning(output.reasoning), "logprobs": None}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        def told(token: int, logprob: float) -> dict[str, Any]:
            text = self._spell(token)
            return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

        content = [told(e.token, e.logprob) | {"top_logprobs": [told(*top) for top in e.top]} for e in logprobs]
        return {"content": content, "refusal": None}

    def _choices(self, piece: Piece) -> list[dict[str, Any]]:
        if self._calls is None or not piece.text:
            return super()._choices(piece)
        calls = [{"index": each.index, **_call(each)} for each in self._calls.add(piece.text)]
        reasoning = [self._choice("", piece.reasoning)] if piece.reasoning else []
        return reasoning + [self._delta({"tool_calls": [call]}) for call in calls]

    def _choice(self, text: str, reasoning: str) -> dict[str, Any]:
        return self._delta(_reasoning(reasoning) | ({"content": text} if text else {}))

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        role = {} if self._begun else {"role": "assistant", "content": ""}
        self._begun = True
        return {"index": 0, "delta": role | delta, "logprobs": None, "finish_reason": None}


def usage(output: RequestOutput) -> dict[str, Any]:
    """What a finished request took, in tokens, and how drafting went. No prompt is cached between requests."""
    return {
        **_counts(len(output.prompt_token_ids), len(output.token_ids)),
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
        "speculation": output.speculation.to_json(),
    }


def _finite(logprob: float) -> float:
    return max(-9999.0, logprob)  # JSON has no infinity


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _end(output: RequestOutput, *, called: bool) -> dict[str, Any]:
    reason = _FINISH.get(output.finish_reason, output.finish_reason)
    end = {
        "finish_reason": "tool_calls" if called and reason == "stop" else reason,
        "native_finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "seed": output.seed,
    }
    return end | ({} if output.error is None else {"error": output.error})


def _reasoning(text: str) -> dict[str, str]:
    """Reasoning under the names that clients read: DeepSeek's and vLLM's."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call(delta: Delta) -> dict[str, Any]:
    function: dict[str, str] = {"arguments": delta.arguments}
    if delta.name is None:
        return {"function": function}
    return {"id": delta.id, "type": "function", "function": {"name": delta.name} | function}
