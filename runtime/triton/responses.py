"""From a request's stream of pieces to Triton's responses: one per piece, or exactly one."""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tandemrt.engines import serving
from tandemrt.engines.errors import BadRequest, QueueFull, TandemError, named
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.requests.outputs import RequestOutput, StreamOutput
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.triton.requests import Ask

log = logging.getLogger(__name__)

_DTYPES = {"BYTES": np.object_, "INT32": np.int32, "UINT32": np.uint32, "UINT64": np.uint64}
_SPECS = {spec.name: spec for spec in serving.OUTPUTS}


class Outbox:
    """A thread that sends responses, so that the loop never waits for the server.

    It queues requests, not responses: whatever one has to say by its turn goes out as one response. However slow the
    server is, the queue is no longer than the number of open requests, and each has its turn.
    """

    def __init__(self) -> None:
        self._replies: SimpleQueue[Reply | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tandemrt-responses", daemon=True)
        self._thread.start()

    def put(self, reply: "Reply") -> None:
        self._replies.put(reply)

    def close(self) -> None:
        """Send what is left and stop."""
        self._replies.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (reply := self._replies.get()) is not None:
            try:
                reply.send()
            except BaseException as error:  # the responses of others need this thread
                log.exception("a response could not be sent; its request is cancelled")
                reply.give_up(error)


class Reply:
    """One request's way back: the loop calls ``listen``, the outbox ``send``."""

    def __init__(self, sender: Any, ask: Ask, outbox: Outbox) -> None:
        self._sender: Any | None = sender  # None once the final response is sent
        self._final = threading.Lock()
        self._ask = ask
        self._outbox = outbox
        self._submitted: Future[Request] = Future()  # the loop may speak before it is known
        self._echoed: set[int] = set()  # outputs in front of which the prompt was sent
        self._left = ask.params.n  # outputs that have not ended
        self._items: list[StreamOutput] = []  # heard, not yet taken by the outbox, which has this reply in its queue
        self._hearing = threading.Lock()
        self._tokens: dict[int, list[int]] = {}  # by output: known, not yet sent
        self.moved = False  # since the watch asked about it

    def start(self, llm: LLM) -> None:
        """Queue the request. Raises BadRequest or QueueFull."""
        request = llm.submit(self._ask.prompt, self._ask.params, self.listen, client=self._ask.client)
        self._submitted.set_result(request)

    @property
    def request(self) -> Request:
        return self._submitted.result()

    @property
    def done(self) -> bool:
        return self._sender is None

    def abandoned(self) -> bool:
        """Whether the client cancelled or went away. Asks the server."""
        self.moved = False
        with self._final:  # asked about a request that has had its final response, the server crashes
            return self._sender is not None and bool(self._sender.is_cancelled())

    def listen(self, item: StreamOutput) -> None:
        self.moved = True
        if self._ask.stream or item.output is not None:
            with self._hearing:
                self._items.append(item)
                if len(self._items) > 1:
                    return
            self._outbox.put(self)

    def send(self) -> None:
        """Send what was heard since the last time: in a stream its text, else the whole output at the end."""
        with self._hearing:
            items, self._items = self._items, []
        for index in dict.fromkeys(item.index for item in items):
            self._say(index, [item for item in items if item.index == index])

    def _say(self, index: int, items: Sequence[StreamOutput]) -> None:
        text, reasoning = "".join(item.text for item in items), "".join(item.reasoning for item in items)
        tokens = self._tokens.setdefault(index, [])
        tokens += [token for item in items for token in item.token_ids]
        output = items[-1].output
        if output is not None:
            self._finish(text, reasoning, output)
        elif (text or reasoning) and not self.done:
            self._respond(self._piece(index, text, reasoning, tokens), final=False)

    def give_up(self, error: BaseException) -> None:
        """End a request whose responses cannot be sent: a client that still listens is told why."""
        self._cancel()
        with self._final:
            sender, self._sender = self._sender, None
            if sender is not None:
                try:
                    refuse(sender, error)
                except BaseException:  # the server has closed the way back, the final response with it
                    log.exception("a request could not be told that it failed")

    def _finish(self, text: str, reasoning: str, output: RequestOutput) -> None:
        with self._final:
            if self._sender is None:
                return
            error = _failure(output, (self.request, *self.request.others)[output.index].failure)
            tokens = self._tokens[output.index]
            if not self._ask.stream:
                text, reasoning, tokens = output.text, output.reasoning, output.token_ids
            if error is not None:
                refuse(self._sender, error)
                self._cancel()
                self._left = 0
            else:
                self._left -= 1
                piece = self._piece(output.index, text, reasoning, tokens)
                self._respond(piece | _summary(output), final=not self._left)
            if not self._left:
                self._sender = None  # the stub must not find one at its end

    def _cancel(self) -> None:
        for request in (self.request, *self.request.others):
            request.cancel()

    def _piece(self, index: int, text: str, reasoning: str, tokens: list[int]) -> dict[str, Any]:
        self._tokens[index] = []
        if index not in self._echoed:
            self._echoed.add(index)
            text = self._ask.echo + text
        return {
            **({"index": index} if self._ask.params.n > 1 else {}),
            "text_output": text,
            "reasoning_output": reasoning,
            "token_ids": tokens,
            "num_input_tokens": len(self.request.prompt),
            "num_output_tokens": len(tokens),
        }

    def _respond(self, values: Mapping[str, Any], *, final: bool) -> None:
        assert self._sender is not None, "a response after the final one"
        tensors = [_tensor(name, values[name]) for name in values if name in self._ask.returns]
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=flags)


def refuse(sender: Any, error: BaseException) -> None:
    """Answer with an error, under the code Triton's clients know for it, as the only or the last response."""
    code = pb_utils.TritonError.INTERNAL
    if isinstance(error, BadRequest):
        code = pb_utils.TritonError.INVALID_ARG
    elif isinstance(error, QueueFull | TimedOut):
        code = pb_utils.TritonError.UNAVAILABLE
    elif isinstance(error, Cancelled):
        code = pb_utils.TritonError.CANCELLED
    message = str(error) if isinstance(error, TandemError) else named(error)
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class TimedOut(TandemError):
    """The time ran out before the first token."""


class Cancelled(TandemError):
    """The client cancelled the request."""


def _failure(output: RequestOutput, failure: BaseException | None) -> BaseException | None:
    if failure is not None:
        return failure
    if output.finish_reason == "cancelled":
        return Cancelled("the request was cancelled")
    if output.finish_reason == "timeout" and not output.token_ids:
        return TimedOut("timeout_s: request timeout expired before the first token; send it again later or allow more")
    return None


def _summary(output: RequestOutput) -> dict[str, Any]:
    summary = {
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "speculation": json.dumps(output.speculation.to_json()),
    }
    if output.stop_reason is not None:
        summary["stop_reason"] = str(output.stop_reason)
    if output.logprobs is not None:
        summary["logprobs"] = json.dumps([each.to_json() for each in output.logprobs])
    if output.prompt_logprobs is not None:
        summary["prompt_logprobs"] = json.dumps([each.to_json() for each in output.prompt_logprobs])
    if output.error is not None:
        summary["constraint_error"] = output.error
    return summary


def _tensor(name: str, value: Any) -> Any:
    spec = _SPECS[name]
    items = value if spec.is_list else [value.encode() if isinstance(value, str) else value]
    return pb_utils.Tensor(name, np.array(items, _DTYPES[spec.datatype]))
