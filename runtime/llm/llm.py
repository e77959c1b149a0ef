"""The Python interface: open a bundle, generate, stream."""

import gc
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from inspect import Parameter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack, overload

from tandemrt.engines.bundle.bundle import TOKENIZER, Bundle
from tandemrt.engines.bundle.lock import locked
from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.engines.options.options import OpeningOptions, RuntimeOptions, signature
from tandemrt.engines.parallel.threads import SharedWork, begun
from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.text.tokenizer import Tokenizer, load_tokenizer, read_tokenizer
from tandemrt.engines.validation.errors import BadRequest, Closed, InternalError, TandemError, named
from tandemrt.plugins.tensors.devices.context import create_context
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.device.backends.base import CheckedEngine
from tandemrt.runtime.device.mapped_weights import MappedWeights
from tandemrt.runtime.engine_loop.loop import EngineLoop
from tandemrt.runtime.engine_loop.loop_thread import LoopThread
from tandemrt.runtime.llm.assemble import assemble
from tandemrt.runtime.llm.free_memory import trim_memory
from tandemrt.runtime.llm.on_demand import bundle_folder
from tandemrt.runtime.llm.progress import spinner
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.admission import Admission
from tandemrt.runtime.requests.prompt import Chat, Message, Prompt, is_batch
from tandemrt.runtime.requests.request import OutputListener, Request, RequestOutput, StreamOutput
from tandemrt.runtime.requests.running import QueuedRequest
from tandemrt.runtime.requests.trace import RequestTrace
from tandemrt.runtime.requests.vision import TowerRunner
from tandemrt.runtime.workers.clients import UNNAMED, Client
from tandemrt.runtime.workers.threads import run_in_thread

if TYPE_CHECKING:
    from tandemrt.runtime.trace.recorder import Recorder


class LLM:
    """A target with its draft, opened from a bundle and ready for requests.

    Args:
        bundle: folder written by ``tandemrt export build``. A recipe, a checkpoint's folder or a name on the Hugging
            Face hub is built first, once, into the user's cache folder.
        max_model_len, dtype, draft: choices for a checkpoint's default recipe (engines/options/build_options.py).
        warm_up_later: return before calls of every shape have run; the loop runs the others while it has no request.
            Until ``loop`` returns, no other LLM may open on this GPU. For servers of one bundle.
        trace: a file that ``close`` writes: where each token of the latest requests came from (drafted or not), as a
            page (.html) or Chrome trace (.json).
        options: the fields of RuntimeOptions (engines/options/options.py).

    Raises BadRequest for invalid options, and BadBundle or BackendUnavailable if the bundle cannot run here. Several
    threads may send requests. ``close`` (or leaving a ``with`` block) cancels running requests; later ones raise
    Closed. An LLM that is garbage-collected also closes, and frees its memory after its last round. A listener may
    call ``close`` but not ``generate``. A forked child must open the bundle again.
    """

    __signature__ = signature(
        [
            Parameter("bundle", Parameter.POSITIONAL_OR_KEYWORD, annotation=str | Path),
            Parameter("trace", Parameter.KEYWORD_ONLY, default=None, annotation=str | Path | None),
            Parameter("max_model_len", Parameter.KEYWORD_ONLY, default=None, annotation=int | None),
            Parameter("dtype", Parameter.KEYWORD_ONLY, default=None, annotation=str | None),
            Parameter("draft", Parameter.KEYWORD_ONLY, default=None, annotation=str | None),
            Parameter("warm_up_later", Parameter.KEYWORD_ONLY, default=False, annotation=bool),
        ]
    )

    def __init__(
        self,
        bundle: str | Path,
        *,
        trace: str | Path | None = None,
        max_model_len: int | None = None,
        dtype: str | None = None,
        draft: str | None = None,
        warm_up_later: bool = False,
        **options: Unpack[OpeningOptions],
    ) -> None:
        chosen = RuntimeOptions(**options)
        self._trace = _trace_file(trace)
        folder = bundle_folder(bundle, BuildOptions(max_model_len, dtype, draft))
        reading = begun(partial(read_tokenizer, folder / TOKENIZER))  # the longest part of an opening on a CPU
        with collected_later():
            self.bundle = Bundle.open(folder)
            chosen.require_fit(self.bundle.limits)
            self.tokenizer, loop, tower = _open(self.bundle, chosen, reading)
            self._admission = Admission(
                self.bundle,
                self.tokenizer,
                chosen,
                num_draft_tokens=loop.draft_windows.largest,
                tower=tower,
            )
        self.recorder = None if self._trace is None else _new_recorder()
        self._metrics = loop.metrics
        self._metrics.listener = None if self.recorder is None else self.recorder.span
        self._scheduler = loop.scheduler
        self._loop_thread = LoopThread(loop)
        weakref.finalize(self, _release, self._loop_thread, self._admission).atexit = False
        if chosen.cuda_graphs and not device_of(loop.streams.device).on_host:
            self._capture(loop, later=warm_up_later)

    @overload
    def generate(  # type: ignore[overload-overlap]  # to a type checker a str is a Sequence[str]
        self, prompts: Prompt, params: SamplingParams | None = None
    ) -> RequestOutput: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]: ...

    def generate(self, prompts: Any, params: Any = None) -> RequestOutput | list[RequestOutput]:
        """Generate for one prompt (a text, token ids or chat messages), or for a list of prompts.

        ``params``: one SamplingParams for all, or a list with one per prompt. With several outputs per prompt (``n``),
        its RequestOutput is the first and holds all of them in ``outputs``. Raises BadRequest before anything runs if a
        prompt or its parameters are invalid. In a list, a request that fails later returns ``finish_reason="error"``
        and affects no other; a single request raises.
        """
        self._loop_thread.require_usable(waits=True)
        if not is_batch(prompts):
            collector = _OutputCollector(params)
            queued = self._admit(prompts, params, collector.on_output, streams=False)
            try:
                self._loop_thread.submit(*queued, block=True)
                output = collector.output.result()
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
        collectors = [_OutputCollector(p) for p in each]
        groups = [
            self._admit(prompt, request_params, collector.on_output, streams=False)
            for prompt, request_params, collector in zip(prompts, each, collectors, strict=True)
        ]
        try:
            for group in groups:
                self._loop_thread.submit(*group, block=True)
            return [collector.output.result() for collector in collectors]
        except BaseException:
            for group in groups:
                self.cancel(group[0].request)
            raise

    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]: ...

    def chat(self, messages: Any, params: Any = None, **options: Any) -> RequestOutput | list[RequestOutput]:
        """Answer the messages of one chat, or of each chat in a list of chats, as ``generate`` does.

        ``options``: the fields of ChatOptions (engines/text/chat.py), such as ``tools`` and ``chat_template_kwargs``.
        """
        if is_batch(messages):
            return self.generate([Chat(each, **options) for each in messages], params)
        return self.generate(Chat(messages, **options), params)

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[StreamOutput]:
        """Yield text as it becomes final; the last item carries the complete ``output``.

        With several outputs (``n``), the ``index`` of an item names its output, and each output has a last item.
        Leaving the iteration cancels the request. Raises BadRequest or QueueFull before the first item.
        """
        import asyncio  # slow to import, and only streams need it

        self._loop_thread.require_usable(waits=True)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[StreamOutput] = asyncio.Queue()

        def listen(item: StreamOutput) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, item)
            except RuntimeError:  # the event loop is closed
                self.cancel(request)

        # In a thread, because tokenizing a prompt takes time and must not block other streams of this event loop.
        queued = await run_in_thread("stream", self._admit, prompt, params, listen)
        request = queued[0].request
        self._loop_thread.submit(*queued, block=False)
        try:
            left = sum(not waiting.request.scores_prompt for waiting in queued)
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
        listener: OutputListener,
        *,
        client: str | Client = "",
        traced: bool = False,
        streams: bool = True,
    ) -> Request:
        """Send one request without waiting; ``listener`` is called from the loop's thread with each StreamOutput.

        For servers. Named clients get equal shares of the slots and the queue; a Client also has users. With
        ``traced``, the request's ``trace`` records where each token came from. Without ``streams``, each output comes
        in one item, at its end. With several outputs (``n``), the returned request is the first, and its ``others`` are
        the rest. Raises BadRequest or QueueFull before anything
        is queued; later failures are in the last item's ``output.error``.
        """
        self._loop_thread.require_usable(waits=False)
        sender = Client(client) if isinstance(client, str) else client
        with self._scheduler.arrivals.admitting():
            queued = self._admit(prompt, params, listener, client=sender, streams=streams)
            self._admission.hold_images(queued[0].request)
            for waiting in queued:
                if traced and waiting.request.trace is None:
                    waiting.request.trace = RequestTrace()
            self._loop_thread.submit(*queued, block=False)
        return queued[0].request

    def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        client: Client = UNNAMED,
        cache_salt: str | None = None,
    ) -> list[int]:
        """Return the token ids that a text or chat has as a prompt, also of one that is too long for the engine.

        ``add_special_tokens``: whether a text gets its begin and end tokens. ``cache_salt``: only prompts of one salt
        share images. Raises BadRequest.
        """
        special = add_special_tokens
        return self._admission.tokenize(prompt, add_special_tokens=special, client=client, salt=cache_salt)

    def cancel(self, request: Request) -> None:
        """End a request and its ``others``; each finishes with "cancelled" within a round, unless it has finished."""
        for each in (request, *request.others):
            each.cancel()
        self._scheduler.wake()

    @property
    def loop(self) -> EngineLoop:
        """The engine loop, for measurements and checks; use it only while no request runs.

        Waits until it has warmed up completely (``warm_up_later``). Raises Closed once closed.
        """
        self._loop_thread.wait_until_idle()
        return self._loop_thread.loop

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    @property
    def closed(self) -> bool:
        """Whether no more requests are accepted, because the LLM was closed or its loop has died."""
        return self._scheduler.closed

    @property
    def problem(self) -> str | None:
        """What keeps requests from their end, if that is known: a rank that does not answer."""
        try:
            return self._loop_thread.loop.target.problem
        except Closed:
            return None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._scheduler.waiting

    @property
    def running(self) -> int:
        """Requests in slots."""
        return self._scheduler.running

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache's memory that running requests hold, 0 to 1. May be read from any thread."""
        try:
            return self._loop_thread.loop.cache_manager.usage
        except Closed:
            return 0.0

    def close(self) -> None:
        """Cancel all requests, stop the loop, and write the trace file, if any. Safe to call twice."""
        self._loop_thread.close()
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

    def _capture(self, loop: EngineLoop, *, later: bool) -> None:
        target = loop.target.engines["target"]
        if not target.capturable and not isinstance(target, CheckedEngine):  # such a one has graphs of its own
            return
        from tandemrt.runtime.engine_loop.capture import capture
        from tandemrt.runtime.llm.progress import progress_bar

        try:
            with progress_bar("capturing CUDA graphs") as progress:
                first = partial(capture, loop, progress, adaptive=later)
                self._loop_thread.prepare(first if later else lambda: [*first()])
        except BaseException:
            self.close()
            raise

    def _admit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        listener: OutputListener,
        *,
        client: Client = UNNAMED,
        streams: bool = True,
    ) -> list[QueuedRequest]:
        queued = self._admission.admit(prompt, params or SamplingParams(), listener, client=client, streams=streams)
        if self.recorder is not None:
            for waiting in queued:
                if not waiting.request.scores_prompt:
                    self.recorder.follow(waiting.request)
        return queued


@contextmanager
def collected_later() -> Iterator[None]:
    """Pause garbage collection while models open: almost all that they make lives as long as they do."""
    pauses = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()


def _open(
    bundle: Bundle, options: RuntimeOptions, reading: SharedWork[Tokenizer]
) -> tuple[Tokenizer, EngineLoop, TowerRunner | None]:
    """Open the engines while a thread is ``reading`` the tokenizer. Native code runs beside it, Python code waits."""
    create_context(bundle.device(options.device))
    with spinner(f"opening {bundle.name}", bundle.manifest.weights):
        loop, tower = _open_loop(bundle, options)
        tokenizer = load_tokenizer(
            bundle.tokenizer_dir,
            chat_template=options.chat_template,
            delimiters=bundle.manifest.delimiter_texts,
            read=reading.result,
        )
    trim_memory()  # reading both takes twice the memory that they need
    return tokenizer, loop, tower


def _open_loop(bundle: Bundle, options: RuntimeOptions) -> tuple[EngineLoop, TowerRunner | None]:
    """Open the engines; while the loop exists, they run with the weights as they are now, and the bundle is in use."""
    with ExitStack() as stack:
        stack.enter_context(locked(bundle.folder, shared=True, wait=True))  # `models rm` removes no locked bundle
        weights = MappedWeights(bundle)
        stack.callback(weights.close)
        loop = assemble(bundle, options)
        reads_images = bundle.manifest.vision is not None
        tower = TowerRunner.open(bundle, loop.streams.device, options.threads) if reads_images else None
        weights.watch()
        weakref.finalize(loop, stack.pop_all().close).atexit = False
    return loop, tower


def _trace_file(path: str | Path | None) -> Path | None:
    if path is None:
        return None
    from tandemrt.runtime.trace.file import trace_file

    return trace_file(path)


def _new_recorder() -> "Recorder":
    from tandemrt.runtime.trace.recorder import Recorder

    return Recorder()


def _release(loop_thread: LoopThread, admission: Admission) -> None:
    """Close without waiting: garbage collection may call this in any thread."""
    loop_thread.request_close()
    admission.close()


def _as_error(failure: BaseException) -> Exception:
    return failure if isinstance(failure, TandemError) else InternalError(named(failure))


class _OutputCollector:
    """Collect all outputs of one prompt for a caller that waits.

    ``output`` is done when every output that ``params.n`` asks for has finished; its result is the first output, with
    the others in ``others``.
    """

    def __init__(self, params: SamplingParams | None) -> None:
        self.output: Future[RequestOutput] = Future()
        self._count = params.n if isinstance(params, SamplingParams) else 1
        self._finished: dict[int, RequestOutput] = {}

    def on_output(self, item: StreamOutput) -> None:
        """The listener of the requests, called in the engine loop's thread."""
        if item.output is None:
            return
        self._finished[item.index] = item.output
        if len(self._finished) == self._count:
            first, *others = (self._finished[index] for index in range(self._count))
            self.output.set_result(replace(first, others=tuple(others)) if others else first)
