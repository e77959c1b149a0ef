"""Format one output of a request as an OpenAI choice: complete, or as the choices of stream chunks."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.request import RequestOutput
from tandemrt.runtime.servers.openai.answer import AnswerParser
from tandemrt.runtime.servers.openai.tools import ToolCallDelta, ToolCallSpec
from tandemrt.runtime.servers.request_stream import OutputDelta


class CompletionChoice:
    """A choice of /v1/completions.

    Args:
        index: position of the output among the prompt's outputs.
        token_text: returns the text of a token id.
        tool_calls: how the text writes tool calls; None: it contains none.
        return_token_ids: whether to include the token ids of prompt and output.
        echo: text before the output, the prompt or "".
    """

    def __init__(
        self,
        index: int,
        token_text: Callable[[int], str],
        *,
        tool_calls: ToolCallSpec | None = None,
        return_token_ids: bool = False,
        echo: str = "",
    ) -> None:
        self._echo = echo
        self._index = index
        self._token_text = token_text
        self._tool_calls = tool_calls
        self._answer = AnswerParser(tool_calls)
        self._begun = False
        self._text_offset = 0  # characters of the tokens whose logprobs were formatted
        self._pending_logprobs: list[TokenLogprobs] = []  # of tokens without certain text
        self._pending_ids: list[int] | None = [] if return_token_ids else None  # likewise
        self._pending_sources: list[Mapping[str, Any]] = []  # likewise

    def complete(self, output: RequestOutput) -> dict[str, Any]:
        """Return the choice of a response without streaming."""
        choice = self._message(output)
        if output.logprobs is not None:
            choice["logprobs"] = self._logprobs(output.logprobs)
        if self._pending_ids is not None:
            choice["token_ids"] = output.token_ids
        return choice | self._finish(output)

    def chunks(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """Return the chunk choices that ``delta`` adds; none if it has no new text. The last one has the end."""
        choices = self._delta_choices(delta)
        self._pending_logprobs += delta.logprobs
        if delta.output is not None:
            finish = self._finish(delta.output)
            choices = [*choices[:-1], {**choices[-1], **finish}] if choices else [self._choice("", "") | finish]
        if choices and self._pending_logprobs:
            choices[0]["logprobs"] = self._logprobs(self._pending_logprobs)
            self._pending_logprobs = []
        if self._pending_ids is not None:
            self._pending_ids += delta.token_ids
            if choices:
                choices[0]["token_ids"], self._pending_ids = self._pending_ids, []
        self._pending_sources += delta.sources
        if choices and self._pending_sources:
            choices[0]["token_sources"], self._pending_sources = self._pending_sources, []
        return choices

    def _finish(self, output: RequestOutput) -> dict[str, Any]:
        finish: dict[str, Any] = {
            "finish_reason": self._answer.finish_reason(output),
            "native_finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "seed": output.seed,
            **({} if output.error is None else {"error": output.error}),
        }
        if self._pending_ids is not None:
            finish["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None:  # in vLLM's form
            finish["prompt_logprobs"] = [None, *map(self._by_token, output.prompt_logprobs)]
        return finish

    def _by_token(self, logprob: TokenLogprobs) -> dict[str, Any]:
        listed = dict([*logprob.top, (logprob.token, logprob.logprob)])
        return {
            str(token): {"logprob": _finite(each), "decoded_token": self._token_text(token)}
            for token, each in listed.items()
        }

    def _message(self, output: RequestOutput) -> dict[str, Any]:
        return self._choice(output.text, output.reasoning)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        texts = [self._token_text(each.token) for each in logprobs]
        *offsets, self._text_offset = accumulate(map(len, texts), initial=self._text_offset)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(each.logprob) for each in logprobs],
            "top_logprobs": [{self._token_text(token): logprob for token, logprob in each.top} for each in logprobs],
            "text_offset": offsets,
        }

    def _delta_choices(self, delta: OutputDelta) -> list[dict[str, Any]]:
        return [self._choice(delta.text, delta.reasoning)] if delta.text or delta.reasoning else []

    def _choice(self, text: str, reasoning: str) -> dict[str, Any]:
        text, self._echo = self._echo + text, ""
        return {"index": self._index, "text": text, **_reasoning(reasoning), "logprobs": None, "finish_reason": None}


class ChatChoice(CompletionChoice):
    """A choice of /v1/chat/completions."""

    def _message(self, output: RequestOutput) -> dict[str, Any]:
        parts = self._answer.parts(output.text, last=True)
        text = "".join(each for each in parts if isinstance(each, str))
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._tool_calls is not None:
            message["content"] = text or None
            if self._answer.calls or self._tool_calls.format is None:  # without a format the answer is calls only
                message["tool_calls"] = [_call(each) for each in self._answer.calls]
        return {"index": self._index, "message": message | _reasoning(output.reasoning), "logprobs": None}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._token_text(token)
            return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

        content = [entry(e.token, e.logprob) | {"top_logprobs": [entry(*top) for top in e.top]} for e in logprobs]
        return {"content": content, "refusal": None}

    def _delta_choices(self, delta: OutputDelta) -> list[dict[str, Any]]:
        if self._tool_calls is None:
            return super()._delta_choices(delta)
        choices = [self._choice("", delta.reasoning)] if delta.reasoning else []
        for each in self._answer.parts(delta.text, last=delta.output is not None):
            if isinstance(each, str):
                choices.append(self._choice(each, ""))
            else:
                choices.append(self._chunk_choice({"tool_calls": [{"index": each.index, **_call(each)}]}))
        return choices

    def _choice(self, text: str, reasoning: str) -> dict[str, Any]:
        return self._chunk_choice(_reasoning(reasoning) | ({"content": text} if text else {}))

    def _chunk_choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        role = {} if self._begun else {"role": "assistant", "content": ""}
        self._begun = True
        return {"index": self._index, "delta": role | delta, "logprobs": None, "finish_reason": None}


def _finite(logprob: float) -> float:
    return max(-9999.0, logprob)  # JSON has no infinity


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under both names that clients read: DeepSeek's and vLLM's."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call(delta: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, str] = {"arguments": delta.arguments}
    if delta.name is None:
        return {"function": function}
    return {"id": delta.id, "type": "function", "function": {"name": delta.name} | function}
