"""The Python face: open a bundle, generate, stream."""

import weakref
from collections.abc import AsyncIterator, Sequence
from functools import partial
from inspect import Parameter
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack, overload

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.errors import BadRequest, InternalError, TandemError, named
from tandemrt.engines.options import OpeningOptions, RuntimeOptions, signature
from tandemrt.engines.params import SamplingParams
from tandemrt.engines.tokenizer import open_tokenizer
from tandemrt.runtime.assemble import assemble
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.progress import working
from tandemrt.runtime.requests.admission import Admission
from tandemrt.runtime.requests.gathered import Gathered
from tandemrt.runtime.requests.outputs import RequestOutput, StreamOutput
from tandemrt.runtime.requests.prompt import Prompt, is_batch
from tandemrt.runtime.requests.request import Listener, Request
from tandemrt.runtime.requests.waiting import Waiting
from tandemrt.runtime.round.capture import capture
from tandemrt.runtime.round.loop import Loop
from tandemrt.runtime.round.worker import Worker
from tandemrt.runtime.trace.recorder import Recorder
from tandemrt.runtime.trace.trace import Trace


class LLM:
    """A target and a draft model, opened from a bundle and ready for requests.

    Args:
        bundle: folder written by ``tandemrt export build``.
        trace: a file that is written when it closes, with where each token of the newest requests came from: a page
            (.html) or a Chrome trace (.json).
        options: the fields of RuntimeOptions (engines/options.py), which says what each means.

    Raises BadRequest for options that make no sense, alone or for this bundle, and BadBundle or BackendUnavailable if
    the bundle cannot run here. Requests may be sent from several threads; ``close`` (or leaving a ``with`` block)
    cancels what is running; later requests raise Closed. One that is dropped without closing does the same, and gives
    its memory back when its last round is over. A listener may ask to close but not generate; a forked child opens the
    bundle again.
    """

    __signature__ = signature(
        [
            Parameter("bundle", Parameter.POSITIONAL_OR_KEYWORD, annotation=str | Path),
            Parameter("trace", Parameter.KEYWORD_ONLY, default=None, annotation=str | Path | None),
        ]
    )

    def __init__(
        self, bundle: str | Path, *, trace: str | Path | None = None, **options: Unpack[OpeningOptions]
    ) -> None:
        asked = RuntimeOptions(**options)
        self._trace = _trace_file(trace)
        self.bundle = Bundle.open(bundle)
        asked.require_fit(self.bundle.limits)
        folder, markers = self.bundle.tokenizer_dir, self.bundle.manifest.marker_texts
        self.tokenizer, vocabulary = open_tokenizer(
            folder, self.bundle.vocab, chat_template=asked.chat_template, markers=markers
        )
        with working(f"opening {self.bundle.name}", self.bundle.manifest.weights):
            loop = assemble(self.bundle, asked)
        self._admission = Admission(
            self.bundle,
            self.tokenizer,
            vocabulary,
            asked,
            window=loop.windows.largest,
        )
        self.recorder = None if self._trace is None else Recorder()
        self._metrics = loop.metrics
        self._metrics.listener = None if self.recorder is None else self.recorder.span
        self._scheduler = loop.scheduler
        self._worker = Worker(loop)
        weakref.finalize(self, _let_go, self._worker, self._admission).atexit = False
        if asked.cuda_graphs and loop.clock.device.type == "cuda":
            self._capture(loop)

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

        ``params`` is one SamplingParams for all, or a list with one per prompt. Where ``n`` asks for several outputs
        of a prompt, its RequestOutput is the first of them, and has all in ``outputs``. Raises BadRequest before
        anything runs if a prompt or its parameters cannot be served. In a list, a request that fails later comes back
        with ``finish_reason="error"`` and harms no other; a single one raises.
        """
        self._worker.require_here(waits=True)
        if not is_batch(prompts):
            gathered = Gathered(params)
            queued = self._admit(prompts, params, gathered.listen)
            self._worker.submit(*queued, block=True)
            try:
                output = gathered.output.result()
            except BaseException:  # an interrupt must not leave the request running
                self.cancel(queued[0].request)
                raise
            for waiting in queued:
                if waiting.request.failure is not None:
                    raise _as_error(waiting.request.failure)
            return output
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise BadRequest(f"params: one for each of the {len(prompts)} prompts, received {len(each)}")
        answers = [Gathered(p) for p in each]
        groups = [self._admit(prompt, p, a.listen) for prompt, p, a in zip(prompts, each, answers, strict=True)]
        try:
            for group in groups:
                self._worker.submit(*group, block=True)
            return [answer.output.result() for answer in answers]
        except BaseException:
            for group in groups:
                self.cancel(group[0].request)
            raise

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[StreamOutput]:
        """Yield text as it becomes certain; the last item carries the whole ``output``.

        Of several outputs (``n``) each item says by its ``index`` whose it is, and each output has a last item.
        Leaving the iteration cancels the request. Raises BadRequest or QueueFull before the first item.
        """
        import asyncio  # slow to import, and only streams need it

        self._worker.require_here(waits=True)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[StreamOutput] = asyncio.Queue()

        def listen(item: StreamOutput) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, item)
            except RuntimeError:  # the event loop was closed: nobody listens any longer
                self.cancel(request)

        # In a thread: a prompt takes time to read, and other streams of this event loop go on meanwhile.
        queued = await asyncio.to_thread(self._admit, prompt, params, listen)
        request = queued[0].request
        self._worker.submit(*queued, block=False)
        try:
            left = sum(not waiting.request.scores for waiting in queued)
            while left:
                item = await queue.get()
                failure = queued[item.index].request.failure
                if item.output is not None and failure is not None:
                    raise _as_error(failure)
                yield item
                left -= item.output is not None
        finally:
            self.cancel(request)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        listener: Listener,
        *,
        client: str = "",
        traced: bool = False,
    ) -> Request:
        """Send one request without waiting; ``listener`` is called from the loop's thread with each StreamOutput.

        For servers. Those that name ``client`` share the slots and the queue in equal parts, by client. With
        ``traced``, the request's ``trace`` says where each of its tokens came from. Where ``n`` asks for several
        outputs, the request is that of the first, and has those of the ``others``. Raises BadRequest or QueueFull, and
        nothing is queued then; what fails later is in the last item's ``output.error``.
        """
        self._worker.require_here(waits=False)
        queued = self._admit(prompt, params, listener, client=client)
        for waiting in queued:
            if traced and waiting.request.trace is None:
                waiting.request.trace = Trace()
        self._worker.submit(*queued, block=False)
        return queued[0].request

    def cancel(self, request: Request) -> None:
        """End a request and its ``others``; each finishes with "cancelled" within a round, unless it has finished."""
        for each in (request, *request.others):
            each.cancel()
        self._scheduler.wake()

    @property
    def loop(self) -> Loop:
        """The rounds and their engines, for measures and checks: touch them only while no request runs.

        Raises Closed once closed.
        """
        return self._worker.loop

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    @property
    def closed(self) -> bool:
        """Whether no request is taken any more: it was closed, or its loop has died."""
        return self._scheduler.closed

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._scheduler.waiting

    @property
    def running(self) -> int:
        """Requests in slots."""
        return self._scheduler.running

    def close(self) -> None:
        """Cancel all requests, stop, and write the trace that was asked for. Safe to call twice."""
        self._worker.close()
        self._admission.close()
        place, self._trace = self._trace, None
        if place is not None and self.recorder is not None:
            from tandemrt.runtime.trace.file import write_trace

            write_trace(place, self.recorder, self.tokenizer.backend, self.bundle.name)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _capture(self, loop: Loop) -> None:
        if not loop.tandem.engines["target"].capturable:
            return
        from tandemrt.runtime.progress import progress_bar

        try:
            with progress_bar("capturing CUDA graphs") as progress:
                self._worker.prepare(partial(capture, loop, progress))
        except BaseException:
            self.close()
            raise

    def _admit(
        self, prompt: Prompt, params: SamplingParams | None, listener: Listener, *, client: str = ""
    ) -> list[Waiting]:
        queued = self._admission.admit(prompt, params or SamplingParams(), listener, client=client)
        if self.recorder is not None:
            for waiting in queued:
                if not waiting.request.scores:
                    self.recorder.follow(waiting.request)
        return queued


def _trace_file(path: str | Path | None) -> Path | None:
    if path is None:
        return None
    from tandemrt.runtime.trace.file import trace_file

    return trace_file(path)


def _let_go(worker: Worker, admission: Admission) -> None:
    """What an LLM that nobody holds any more leaves behind. It may be dropped anywhere, so nobody is waited for."""
    worker.ask_to_close()
    admission.close()


def _as_error(failure: BaseException) -> Exception:
    return failure if isinstance(failure, TandemError) else InternalError(named(failure))
