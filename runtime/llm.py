"""The Python face: open a bundle, generate, stream."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import torch
from transformers import AutoTokenizer

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.errors import BadBundle, BadRequest, InternalError, TandemError, clipped
from tandemrt.engines.params import SamplingParams
from tandemrt.engines.tokenizer import open_tokenizer
from tandemrt.runtime.assemble import assemble
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.admission import Admission
from tandemrt.runtime.requests.outputs import RequestOutput, StreamOutput
from tandemrt.runtime.requests.prompt import Prompt, is_batch
from tandemrt.runtime.requests.request import Listener, Request
from tandemrt.runtime.round.loop import Loop
from tandemrt.runtime.round.worker import Worker


class LLM:
    """A target and a draft model, opened from a bundle and ready for requests.

    Args:
        bundle: folder written by ``tandemrt export build``.
        device: "cpu", "cuda" or "cuda:N"; None takes the device the bundle was built for.
        window: drafted tokens per round, at most the bundle's (None: the bundle's; 0: no speculation), or a table
            {requests: window} whose entries hold from their number of running requests on: {1: 4, 33: 2}.
        overlap: run the target while the host commits and fills; None: on a GPU. The tokens are the same.
        threads: CPU threads per engine; None: one per core.
        queue_limit: requests that may wait for a slot.
        grammar_timeout_s: the longest a grammar may take to compile.
        cache_tokens: tokens that a paged cache holds for all requests together; a request waits for room for its
            prompt and ``max_tokens``. None: room for every slot at the bundle's full length.
        cuda_graphs: replay the pieces of a round as CUDA graphs; False is for finding faults.
        profile: measure the device's time by piece (``metrics.device_ms_per_round``).

    Raises BadBundle or BackendUnavailable if the bundle cannot run here. Requests may be sent from several threads;
    ``close`` (or leaving a ``with`` block) cancels what is running; later requests raise Closed.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        device: str | torch.device | None = None,
        window: int | Mapping[int, int] | None = None,
        overlap: bool | None = None,
        threads: int | None = None,
        queue_limit: int = 256,
        grammar_timeout_s: float = 10.0,
        cache_tokens: int | None = None,
        cuda_graphs: bool = True,
        profile: bool = False,
    ) -> None:
        self.bundle = Bundle.open(bundle)
        self.tokenizer, vocabulary = open_tokenizer(
            AutoTokenizer.from_pretrained, self.bundle.tokenizer_dir, self.bundle.vocab
        )
        try:
            self._loop = assemble(
                self.bundle,
                device=device,
                window=window,
                overlap=overlap,
                threads=threads,
                queue_limit=queue_limit,
                cache_tokens=cache_tokens,
                cuda_graphs=cuda_graphs,
                profile=profile,
            )
        except (KeyError, MemoryError, OverflowError, RuntimeError) as error:  # what torch and contracts raise
            raise BadBundle(
                f"bundle {self.bundle.name!r}: cannot run here: {type(error).__name__}: {clipped(error)}; build it "
                "with smaller limits, or again"
            ) from error
        self._admission = Admission(
            self.bundle,
            self.tokenizer,
            vocabulary,
            window=self._loop.drafter.window,
            cache_tokens=self._loop.room.tokens,
            grammar_timeout_s=grammar_timeout_s,
        )
        self._worker = Worker(self._loop)

    @overload
    def generate(  # type: ignore[overload-overlap]  # to a type checker a text is a sequence of texts
        self, prompts: Prompt, params: SamplingParams | None = None
    ) -> RequestOutput: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]: ...

    def generate(self, prompts: Any, params: Any = None) -> RequestOutput | list[RequestOutput]:
        """Generate for one prompt (a text, token ids or chat messages), or for a list of prompts.

        ``params`` is one SamplingParams for all, or a list with one per prompt. Raises BadRequest before anything
        runs if a prompt or its parameters cannot be served. In a list, a request that fails later comes back with
        ``finish_reason="error"`` and harms no other; a single one raises.
        """
        if not is_batch(prompts):
            request, done = self._submit(prompts, params)
            try:
                output = done.result()
            except BaseException:  # an interrupt must not leave the request running
                self.cancel(request)
                raise
            if request.failure is not None:
                raise _as_error(request.failure)
            return output
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise BadRequest(f"params: one for each of the {len(prompts)} prompts, received {len(each)}")
        futures: list[Future[RequestOutput]] = []
        listeners = [_resolver(futures) for _ in prompts]
        requests = [
            self._admission.admit(prompt, p or SamplingParams(), listener)
            for prompt, p, listener in zip(prompts, each, listeners, strict=True)
        ]
        try:
            for request in requests:
                self._worker.submit(request, block=True)
            return [future.result() for future in futures]
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[StreamOutput]:
        """Yield text as it becomes certain; the last item carries the whole ``output``.

        Leaving the iteration cancels the request. Raises BadRequest or QueueFull before the first item.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[StreamOutput] = asyncio.Queue()

        def listen(item: StreamOutput) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, item)
            except RuntimeError:  # the event loop was closed: nobody listens any longer
                request.cancel()

        request = self._admission.admit(prompt, params or SamplingParams(), listen)
        self._worker.submit(request, block=False)
        try:
            while True:
                item = await queue.get()
                if item.output is not None and request.failure is not None:
                    raise _as_error(request.failure)
                yield item
                if item.output is not None:
                    return
        finally:
            self.cancel(request)

    def submit(self, prompt: Prompt, params: SamplingParams | None, listener: Listener) -> Request:
        """Send one request without waiting; ``listener`` is called from the loop's thread with each StreamOutput.

        For servers. Raises BadRequest or QueueFull; what fails later is in the last item's ``output.error``.
        """
        request = self._admission.admit(prompt, params or SamplingParams(), listener)
        self._worker.submit(request, block=False)
        return request

    def cancel(self, request: Request) -> None:
        """End a request; it finishes with "cancelled" within a round. Nothing happens if it has finished."""
        request.cancel()
        self._loop.scheduler.wake()

    @property
    def loop(self) -> Loop:
        """The rounds and their engines, for measures and checks: touch them only while no request runs."""
        return self._loop

    @property
    def metrics(self) -> Metrics:
        return self._loop.metrics

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._loop.scheduler.waiting

    @property
    def running(self) -> int:
        """Requests in slots."""
        return len(self._loop.scheduler.slots())

    def close(self) -> None:
        """Cancel all requests and stop. Safe to call twice."""
        self._worker.close()
        self._admission.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, prompt: Prompt, params: SamplingParams | None) -> tuple[Request, "Future[RequestOutput]"]:
        futures: list[Future[RequestOutput]] = []
        request = self._admission.admit(prompt, params or SamplingParams(), _resolver(futures))
        self._worker.submit(request, block=True)
        return request, futures[0]


def _resolver(futures: "list[Future[RequestOutput]]") -> Listener:
    future: Future[RequestOutput] = Future()
    futures.append(future)

    def listen(item: StreamOutput) -> None:
        if item.output is not None:
            future.set_result(item.output)

    return listen


def _as_error(failure: Exception) -> Exception:
    return failure if isinstance(failure, TandemError) else InternalError(f"{type(failure).__name__}: {failure}")
