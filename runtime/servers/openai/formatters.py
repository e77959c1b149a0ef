"""Format the outputs of a request as OpenAI response objects and stream chunks.

The objects also have fields that clients of vLLM and of TandemRT read. OpenAI has fewer finish reasons than TandemRT,
so ``native_finish_reason`` holds ours. A timeout is "length". A text that its constraint could not continue, or that
failed validation, is "content_filter", so that clients do not parse it.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from tandemrt.engines.text.tokenizer import Tokenizer
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.prompt import Prompt
from tandemrt.runtime.requests.request import RequestOutput, Speculation
from tandemrt.runtime.servers.json_text import encode_event
from tandemrt.runtime.servers.openai.choices import ChatChoice, CompletionChoice
from tandemrt.runtime.servers.openai.request_body import CompletionRequest
from tandemrt.runtime.servers.openai.token_texts import token_text
from tandemrt.runtime.servers.request_stream import OutputDelta

_TEXT = "\0text\0"  # stands for the text of a chunk


class CompletionFormatter:
    """Formats the response to one request to /v1/completions, with one choice per output of each prompt.

    Args:
        model: name of the served model.
        tokenizer: that of the model.
    """

    object = chunk_object = "text_completion"
    id_prefix = "cmpl"
    choice = CompletionChoice

    def __init__(self, request: CompletionRequest, model: str, tokenizer: Tokenizer) -> None:
        self._usage = request.stream_options
        self._include_reasoning = request.include_reasoning
        self._prompt_only = request.prompt_only
        request_id = request.request_id or secrets.token_hex(12)
        self._head = {"id": f"{self.id_prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._warnings = {"warnings": [*request.warnings]} if request.warnings else {}
        echoes = [_echo(prompt, tokenizer) if request.echo else "" for prompt in request.prompts]
        texts = cache(partial(token_text, tokenizer))  # logprobs name the same tokens again and again
        self._choices = [
            self.choice(
                at * request.params.n + index,
                texts,
                tool_calls=request.tool_calls,
                return_token_ids=request.return_token_ids,
                echo_logprobs=request.echo and request.params.logprobs is not None,
                echo=echo,
            )
            for at, echo in enumerate(echoes)
            for index in range(request.params.n)
        ]
        self._texts_alone = not (  # whether chunks may differ in their texts alone
            request.prompt_only
            or request.return_token_ids
            or request.tool_calls is not None
            or request.params.logprobs is not None
            or self._usage.continuous_usage_stats
            or self._usage.include_token_sources
        )
        # JSON before and after the text of such a chunk, by output and whether it is reasoning; see text_chunk
        self._around: dict[tuple[int, bool], list[str]] = {}
        self._tokens = 0  # of all outputs so far
        self._outputs: dict[int, RequestOutput] = {}  # finished ones

    def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the response without streaming."""
        outputs = [self._shown(output) for output in outputs]
        choices = [choice.complete(output) for choice, output in zip(self._choices, outputs, strict=True)]
        figures = {"usage": usage_of(outputs), "metrics": metrics_of(outputs)}
        return {**self._head, "object": self.object, "choices": choices, **figures, **self._warnings}

    def chunks(self, deltas: Sequence[OutputDelta], prompt_tokens: int) -> list[dict[str, Any]]:
        """Return the stream chunks for ``deltas``. The usage, if requested, follows the last chunk of all outputs."""
        return [chunk for delta in deltas for chunk in self._chunks(delta, prompt_tokens)]

    def text_chunk(self, delta: OutputDelta) -> str | None:
        """Return the JSON of the chunk of ``delta`` if it differs from earlier ones in its text alone, else None.

        Such a chunk is no part of ``chunks``. It takes a small part of the time.
        """
        around = self._around.get((delta.index, delta.text == ""))
        if around is None or delta.output is not None or (delta.text == "") == (delta.reasoning == ""):
            return None
        return encode_event(delta.text or delta.reasoning).join(around)

    def _shown(self, output: RequestOutput) -> RequestOutput:
        """Return the part of an output that the response contains."""
        if self._prompt_only:
            logprobs: list[TokenLogprobs] | None = None if output.logprobs is None else []
            output = replace(output, text="", reasoning="", token_ids=[], logprobs=logprobs, reasoning_tokens=0)
            return replace(output, finish_reason="length", stop_reason=None)
        return output if self._include_reasoning else replace(output, reasoning="")

    @property
    def finished(self) -> bool:
        """Whether all outputs have finished."""
        return len(self._outputs) == len(self._choices)

    def _chunks(self, delta: OutputDelta, prompt_tokens: int) -> list[dict[str, Any]]:
        if self._prompt_only:
            output = None if delta.output is None else self._shown(delta.output)
            delta = OutputDelta(delta.index, "", "", (), (), output)
        elif not self._include_reasoning:
            delta = replace(delta, reasoning="", sources=[each for each in delta.sources if each["role"] == "answer"])
        self._tokens += len(delta.token_ids)
        if delta.output is not None:
            self._outputs[delta.index] = delta.output
        choices = self._choices[delta.index].chunks(delta)
        total = usage_of([self._outputs[index] for index in range(len(self._choices))]) if self.finished else None
        so_far = total or _token_counts(prompt_tokens, self._tokens)
        chunks = [self._chunk(choice, so_far) for choice in choices]
        if self._texts_alone and choices and (delta.index, False) not in self._around:
            for is_reasoning in (False, True) if self._include_reasoning else (False,):
                example = self._chunk(self._choices[delta.index].text_choice(_TEXT, is_reasoning=is_reasoning), so_far)
                self._around[delta.index, is_reasoning] = encode_event(example).split(encode_event(_TEXT))
        if chunks:
            chunks[0] |= self._warnings  # in the first chunk of the stream only
            self._warnings = {}
        if total is not None and self._usage.include_usage:
            figures = {"usage": total, "metrics": metrics_of([*self._outputs.values()])}
            chunks.append({**self._head, "object": self.chunk_object, "choices": [], **figures})
        return chunks

    def _chunk(self, choice: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        more = {"usage": usage if self._usage.continuous_usage_stats else None} if self._has_usage else {}
        return {**self._head, "object": self.chunk_object, "choices": [choice], **more}

    @property
    def _has_usage(self) -> bool:
        return self._usage.include_usage or self._usage.continuous_usage_stats


class ChatFormatter(CompletionFormatter):
    """Formats the response to one request to /v1/chat/completions."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"
    choice = ChatChoice


def _echo(prompt: Prompt, tokenizer: Tokenizer) -> str:
    """Return what comes before the text of each choice of ``prompt``."""
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)  # type: ignore[arg-type]  # completions have no chat


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return token counts of all outputs. Each prompt counts once."""
    firsts = [output for output in outputs if output.index == 0]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in firsts)
    return {
        **_token_counts(prompt_tokens, sum(len(output.token_ids) for output in outputs)),
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(output.reasoning_tokens for output in outputs)},
    }


def metrics_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return speculation statistics of all outputs together, in the form of vLLM that load generators read."""
    return {"speculative_decoding": Speculation.total([output.speculation for output in outputs]).to_json()}


def _token_counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
