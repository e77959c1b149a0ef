"""Send the outputs of one request as Triton responses: several for a stream, otherwise exactly one."""

import logging
import threading
from typing import Any

from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.request import RequestOutput, StreamOutput
from tandemrt.runtime.servers.request_stream import OutputDelta, RequestStream
from tandemrt.runtime.servers.triton.request_tensors import InferRequest
from tandemrt.runtime.servers.triton.responses import final_values, send_error, send_values
from tandemrt.runtime.servers.triton.send_queue import SendQueue

log = logging.getLogger(__name__)


class ResponseStream(RequestStream):
    """Responses of one request. The engine loop calls ``on_output``, the send queue's thread ``send``.

    Attributes:
        active: whether the request produced output since the last call of ``client_cancelled``.
    """

    CANCELLED = "the request was cancelled"
    TIMED_OUT = "timeout_s: request timeout expired before the first token; send it again later or allow more"

    def __init__(self, llm: LLM, sender: Any, parsed: InferRequest, queue: SendQueue) -> None:
        super().__init__(llm, parsed, every_round=True)  # for ``active``
        self.active = False
        self._sender: Any | None = sender  # None after the final response
        self._sender_lock = threading.Lock()
        self._infer = parsed
        self._queue = queue
        self._echoed: set[int] = set()  # outputs whose first response had the prompt
        self._unfinished = parsed.params.n  # outputs
        self._tokens: dict[int, list[int]] = {}  # not sent yet, by output

    @property
    def done(self) -> bool:
        """Whether the final response was sent."""
        return self._sender is None

    def client_cancelled(self) -> bool:
        """Ask the server whether the client cancelled or disconnected."""
        self.active = False
        with self._sender_lock:  # Triton crashes if asked after the final response
            return self._sender is not None and bool(self._sender.is_cancelled())

    def on_output(self, item: StreamOutput) -> None:
        self.active = True
        super().on_output(item)

    def send(self) -> None:
        """Send the buffered outputs, one response per output."""
        for delta in self.take():
            tokens = self._tokens.setdefault(delta.index, [])
            tokens += delta.token_ids
            if delta.output is not None:
                self._finish(delta, delta.output, tokens)
            elif (delta.text or delta.reasoning) and not self.done:
                values = self._values(delta.index, delta.text, delta.reasoning, tokens)
                send_values(self._sender, values, self._infer.outputs, final=False)

    def fail(self, error: BaseException) -> None:
        """Cancel the request after ``send`` raised ``error``, and send the error if the server still accepts one."""
        self.cancel()
        with self._sender_lock:
            sender, self._sender = self._sender, None
            if sender is not None:
                try:
                    send_error(sender, error)
                except BaseException:  # the server has closed this request's sender
                    log.exception("the error of a request could not be sent")

    def _finish(self, delta: OutputDelta, output: RequestOutput, tokens: list[int]) -> None:
        with self._sender_lock:
            if self._sender is None:
                return
            error = self.error_of(output)
            if error is not None:
                send_error(self._sender, error)
                self.cancel()
                self._unfinished = 0
            else:
                self._unfinished -= 1
                if self._infer.stream:
                    values = self._values(output.index, delta.text, delta.reasoning, tokens)
                else:
                    values = self._values(output.index, output.text, output.reasoning, output.token_ids)
                final = not self._unfinished
                send_values(self._sender, values | final_values(output), self._infer.outputs, final=final)
            if not self._unfinished:
                self._sender = None  # the backend process must not hold a sender when it ends

    def _values(self, index: int, text: str, reasoning: str, tokens: list[int]) -> dict[str, Any]:
        self._tokens[index] = []
        if index not in self._echoed:
            self._echoed.add(index)
            text = self._infer.echo + text
        return {
            **({"index": index} if self._infer.params.n > 1 else {}),
            "text_output": text,
            "reasoning_output": reasoning,
            "token_ids": tokens,
            "num_input_tokens": len(self.request.prompt),
            "num_output_tokens": len(tokens),
        }

    def _notify(self) -> None:
        self._queue.put(self)
