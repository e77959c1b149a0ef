"""One output of a request in OpenAI's shape, whole and as what a chunk adds to it."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.outputs import RequestOutput
from tandemrt.runtime.serve.reply import Piece
from tandemrt.runtime.serve.tools import Calls, Delta, Spelling

_FINISH = {"timeout": "length", "constraint": "content_filter"}


class TextChoice:
    """An output of /v1/completions.

    Args:
        index: which of the prompt's outputs it is.
        spell: gives the text of a token.
        spelling: how the text spells calls of functions; None: it is text.
        token_ids: whether it tells those of prompt and output.
    """

    def __init__(
        self, index: int, spell: Callable[[int], str], *, spelling: Spelling | None = None, token_ids: bool = False
    ) -> None:
        self._index = index
        self._spell = spell
        self._calls = None if spelling is None else Calls(spelling)
        self._begun = False
        self._told = 0  # characters of the tokens whose logprobs were told
        self._held: list[TokenLogprobs] = []  # of tokens whose text has not come
        self._token_ids: list[int] | None = [] if token_ids else None  # likewise, if they are told

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """All of it."""
        choice = self._message(output)
        if output.logprobs is not None:
            choice["logprobs"] = self._logprobs(output.logprobs)
        if self._token_ids is not None:
            choice["token_ids"] = output.token_ids
        return choice | self._end(output)

    def added(self, piece: Piece) -> list[dict[str, Any]]:
        """What ``piece`` adds, the end with the last one; nothing where no text became certain."""
        choices = self._choices(piece)
        self._held += piece.logprobs
        if piece.output is not None:
            end = self._end(piece.output)
            choices = [*choices[:-1], {**choices[-1], **end}] if choices else [self._choice("", "") | end]
        if choices and self._held:
            choices[0]["logprobs"] = self._logprobs(self._held)
            self._held = []
        if self._token_ids is not None:
            self._token_ids += piece.token_ids
            if choices:
                choices[0]["token_ids"], self._token_ids = self._token_ids, []
        return choices

    def _end(self, output: RequestOutput) -> dict[str, Any]:
        # What a stop string cut off may be half a call.
        called = self._calls is not None and bool(self._calls.whole) and not isinstance(output.stop_reason, str)
        end = _end(output, called=called)
        if self._token_ids is not None:
            end["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None:  # as vLLM has them
            end["prompt_logprobs"] = [None, *map(self._by_token, output.prompt_logprobs)]
        return end

    def _by_token(self, logprob: TokenLogprobs) -> dict[str, Any]:
        listed = dict([*logprob.top, (logprob.token, logprob.logprob)])
        return {
            str(token): {"logprob": _finite(each), "decoded_token": self._spell(token)}
            for token, each in listed.items()
        }

    def _message(self, output: RequestOutput) -> dict[str, Any]:
        return self._choice(output.text, output.reasoning)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        texts = [self._spell(each.token) for each in logprobs]
        *offsets, self._told = accumulate(map(len, texts), initial=self._told)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(each.logprob) for each in logprobs],
            "top_logprobs": [{self._spell(token): logprob for token, logprob in each.top} for each in logprobs],
            "text_offset": offsets,
        }

    def _choices(self, piece: Piece) -> list[dict[str, Any]]:
        return [self._choice(piece.text, piece.reasoning)] if piece.text or piece.reasoning else []

    def _choice(self, text: str, reasoning: str) -> dict[str, Any]:
        return {"index": self._index, "text": text, **_reasoning(reasoning), "logprobs": None, "finish_reason": None}


class ChatChoice(TextChoice):
    """An output of /v1/chat/completions."""

    def _message(self, output: RequestOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        if self._calls is not None:
            told = self._calls.add(output.text, last=True)
            message["content"] = "".join(each for each in told if isinstance(each, str)) or None
            if self._calls.whole or self._calls.spelling.form is None:  # nothing but calls
                message["tool_calls"] = [_call(each) for each in self._calls.whole]
        return {"index": self._index, "message": message | _reasoning(output.reasoning), "logprobs": None}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        def told(token: int, logprob: float) -> dict[str, Any]:
            text = self._spell(token)
            return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

        content = [told(e.token, e.logprob) | {"top_logprobs": [told(*top) for top in e.top]} for e in logprobs]
        return {"content": content, "refusal": None}

    def _choices(self, piece: Piece) -> list[dict[str, Any]]:
        if self._calls is None:
            return super()._choices(piece)
        choices = [self._choice("", piece.reasoning)] if piece.reasoning else []
        for each in self._calls.add(piece.text, last=piece.output is not None):
            if isinstance(each, str):
                choices.append(self._choice(each, ""))
            else:
                choices.append(self._delta({"tool_calls": [{"index": each.index, **_call(each)}]}))
        return choices

    def _choice(self, text: str, reasoning: str) -> dict[str, Any]:
        return self._delta(_reasoning(reasoning) | ({"content": text} if text else {}))

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        role = {} if self._begun else {"role": "assistant", "content": ""}
        self._begun = True
        return {"index": self._index, "delta": role | delta, "logprobs": None, "finish_reason": None}


def _finite(logprob: float) -> float:
    return max(-9999.0, logprob)  # JSON has no infinity


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
