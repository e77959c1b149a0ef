"""The outputs of one prompt, heard one by one, as what a caller waits for."""

from concurrent.futures import Future
from dataclasses import replace

from tandemrt.engines.params import SamplingParams
from tandemrt.runtime.requests.outputs import RequestOutput, StreamOutput


class Gathered:
    """``output`` is the first output of a prompt, the others in it, once all that ``params`` ask for have ended."""

    def __init__(self, params: SamplingParams | None) -> None:
        self.output: Future[RequestOutput] = Future()
        self._count = params.n if isinstance(params, SamplingParams) else 1
        self._ended: dict[int, RequestOutput] = {}

    def listen(self, item: StreamOutput) -> None:
        """Hear of one of them, in the loop's thread."""
        if item.output is None:
            return
        self._ended[item.index] = item.output
        if len(self._ended) == self._count:
            first, *others = (self._ended[index] for index in range(self._count))
            self.output.set_result(replace(first, others=tuple(others)) if others else first)
