"""Format one output of a request as an OpenAI choice: complete, or as the choices of stream chunks."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.request import RequestOutput
from tandemrt.runtime.servers.openai.answer import AnswerParser
from tandemrt.runtime.servers.openai.token_texts import TokenText
from tandemrt.runtime.servers.openai.tools import ToolCallDelta, ToolCallSpec
from tandemrt.runtime.servers.request_stream import OutputDelta


class CompletionChoice:
    """A choice of /v1/completions.

    Args:
        index: position of the output among the prompt's outputs.
        token_text: returns the text of a token id, with ``first`` at the beginning of a text.
        tool_calls: how the text writes tool calls; None: it contains none.
        return_token_ids: whether to include the token ids of prompt and output.
        echo: text before the output, the prompt or "".
        echo_logprobs: whether the logprobs begin with those of the prompt. A stream then has one chunk.
    """

    def __init__(
        self,
        index: int,
        token_text: Callable[..., TokenText],
        *,
        tool_calls: ToolCallSpec | None = None,
        return_token_ids: bool = False,
        echo: str = "",
        echo_logprobs: bool = False,
    ) -> None:
        self._echo = echo
        self._echo_logprobs = echo_logprobs
        self._index = index
        self._token_text = token_text
        self._tool_calls = tool_calls
        self._answer = AnswerParser(tool_calls)
        self._begun = False
        self._echo_complete = False
        self._text_offset: int | None = None  # characters of the tokens whose logprobs were formatted; None: no tokens
        self._pending_logprobs: list[TokenLogprobs] = []  # of tokens without certain text
        self._pending_ids: list[int] | None = [] if return_token_ids else None  # likewise
        self._pending_sources: list[Mapping[str, Any]] = []  # likewise

    def complete(self, output: RequestOutput) -> dict[str, Any]:
        """Return the choice of a response without streaming."""
        self._complete_echo(output.token_ids)
        choice = self._message(output)
        if output.logprobs is not None:
            choice["logprobs"] = self._all_logprobs(output) if self._echo_logprobs else self._logprobs(output.logprobs)
        if self._pending_ids is not None:
            choice["token_ids"] = output.token_ids
        return choice | self._finish(output)

    def chunks(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """Return the chunk choices that ``delta`` adds; none if it has no new text. The last one has the end."""
        if self._echo_logprobs:
            return [] if delta.output is None else [self.complete(delta.output)]
        self._complete_echo(delta.token_ids)
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

    def text_choice(self, text: str, *, is_reasoning: bool) -> dict[str, Any]:
        """Return the choice of a chunk that has only ``text``, after the first one."""
        return self._choice("", text) if is_reasoning else self._choice(text, "")

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
        if output.prompt_logprobs is not None and not self._echo_logprobs:  # in vLLM's form
            finish["prompt_logprobs"] = [None, *map(self._by_token, output.prompt_logprobs)]
        return finish

    def _by_token(self, logprob: TokenLogprobs) -> dict[str, Any]:
        listed = dict([*logprob.top, (logprob.token, logprob.logprob)])
        return {
            str(token): {"logprob": _finite(each), "decoded_token": self._token_text(token).text}
            for token, each in listed.items()
        }

    def _message(self, output: RequestOutput) -> dict[str, Any]:
        return self._choice(output.text, output.reasoning)

    def _complete_echo(self, token_ids: Sequence[int]) -> None:
        """Add the blank of the first token to the prompt: a decoder drops it at the beginning of a text."""
        if not self._echo or not token_ids or self._echo_complete:
            return
        self._echo_complete = True
        inside, alone = (self._token_text(token_ids[0], first=first).text for first in (False, True))
        self._echo += inside[: len(inside) - len(alone)]

    def _all_logprobs(self, output: RequestOutput) -> dict[str, Any]:
        """Return the logprobs of the prompt, whose first token has none, and of the output."""
        first = self._token_text(output.prompt_token_ids[0], first=True)
        self._text_offset = first.characters
        others = self._logprobs([*(output.prompt_logprobs or ()), *(output.logprobs or ())])
        before = {"tokens": first.text, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        return {name: [value, *others[name]] for name, value in before.items()}

    def _token_texts(self, logprobs: Sequence[TokenLogprobs]) -> list[list[TokenText]]:
        """Return the texts at each position: of the token, then of the alternatives."""
        texts = []
        for each in logprobs:
            first, self._text_offset = self._text_offset is None, self._text_offset or 0
            texts.append([self._token_text(token, first=first) for token in (each.token, *(at for at, _ in each.top))])
        return texts

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        texts = self._token_texts(logprobs)
        sizes = [token.characters for token, *_ in texts]
        *offsets, self._text_offset = accumulate(sizes, initial=self._text_offset or 0)
        return {
            "tokens": [token.text for token, *_ in texts],
            "token_logprobs": [_finite(each.logprob) for each in logprobs],
            "top_logprobs": [_by_text(top, each.top) for (_, *top), each in zip(texts, logprobs, strict=True)],
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
        content = []
        for each, texts in zip(logprobs, self._token_texts(logprobs), strict=True):
            values = [each.logprob, *(logprob for _, logprob in each.top)]
            token, *top = [
                {"token": token.text, "logprob": _finite(value), "bytes": list(token.utf8)}
                for token, value in zip(texts, values, strict=True)
            ]
            content.append(token | {"top_logprobs": top})
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


def _by_text(texts: Sequence[TokenText], top: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Return logprobs by the texts of tokens. A token of the same text as a likelier one has its id, as in vLLM."""
    logprobs: dict[str, float] = {}
    for text, (token, logprob) in zip(texts, top, strict=True):
        logprobs[f"token_id:{token}" if text.text in logprobs else text.text] = logprob
    return logprobs


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
