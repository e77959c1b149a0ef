"""Admission: check a request and prepare everything it needs before the queue."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.parallel.threads import SharedWork
from tandemrt.engines.parameters.fit import require_fit
from tandemrt.engines.parameters.generation_config import recommended
from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.text.tokenizer import Tokenizer, vocabulary_of
from tandemrt.engines.validation.errors import BadBundle, BadRequest, Closed, ContextLengthExceeded, quoted
from tandemrt.runtime.caches.hashes import BlockHashes
from tandemrt.runtime.constraints.bad_words import BadWords
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.grammars.grammar import Grammar
from tandemrt.runtime.grammars.time_limit import GrammarTimeLimit
from tandemrt.runtime.requests.image_memory import ImageMemory
from tandemrt.runtime.requests.images import ImageReader
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.prompt import Prompt, PromptReader, image_processes, prompt_processes
from tandemrt.runtime.requests.prompt_logprobs import PromptLogprobsCollector, scoring_request
from tandemrt.runtime.requests.request import OutputListener, Request
from tandemrt.runtime.requests.request_size import RequestSize
from tandemrt.runtime.requests.running import QueuedRequest, RequestConstraints
from tandemrt.runtime.requests.text import TextStream
from tandemrt.runtime.requests.vision import TowerRunner
from tandemrt.runtime.workers.clients import UNNAMED, Client
from tandemrt.runtime.workers.sandbox.lanes import ProcessLanes

if TYPE_CHECKING:
    from tandemrt.runtime.grammars.library import Compiled, GrammarLibrary


class Admission:
    """Turns prompts and sampling parameters into queued requests, within the limits of the bundle and the options.

    ``num_draft_tokens``: the largest number of draft tokens per round. ``tower``: of a bundle that reads images.
    """

    def __init__(
        self,
        bundle: Bundle,
        tokenizer: Tokenizer,
        options: RuntimeOptions,
        *,
        num_draft_tokens: int,
        tower: TowerRunner | None = None,
    ) -> None:
        self._bundle = bundle
        self._tokenizer = tokenizer
        # Read when a grammar, bad words or reasoning delimiters need it, which takes a tenth of a start.
        self._vocabulary = SharedWork(partial(vocabulary_of, tokenizer, bundle.tokenizer_dir, bundle.vocab))
        self._defaults = recommended(bundle.tokenizer_dir) if options.generation_config else {}
        self._num_draft_tokens = num_draft_tokens
        self._digest = bundle.manifest.digest if options.prefix_caching else None
        self._thinking = self._thinking_rule()
        self._processes = prompt_processes(tokenizer)
        self._tower = tower
        vision = bundle.manifest.vision
        # Of their own: they need no tokenizer, which takes long to open, and one client may send many images.
        self._image_processes = None if vision is None else image_processes()
        self._prompts = PromptReader(
            tokenizer,
            valid_tokens=bundle.valid_tokens,
            limit=bundle.limits.length - 1,
            max_bytes=options.prompt_bytes(bundle.limits),
            processes=self._processes,
            timeout_s=options.prompt_timeout_s,
            images=None if vision is None else ImageReader(vision, options, tokenizer.backend),
            image_processes=self._image_processes,
        )
        self._image_memory = None if vision is None else ImageMemory.of(bundle, options.max_image_memory)
        self._options = options
        self._lock = threading.Lock()
        self._grammars: GrammarLibrary | None = None
        self._closed = False

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool, client: Client, salt: str | None) -> list[int]:
        """Return the token ids of a prompt. Raises BadRequest."""
        return self._prompts.tokenize(prompt, add_special_tokens=add_special_tokens, client=client, salt=salt)

    def admit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        listener: OutputListener,
        *,
        client: Client = UNNAMED,
        streams: bool = True,
    ) -> list[QueuedRequest]:
        """Return requests for the queue: one per output, and one more if prompt logprobs must be computed.

        All outputs share one ``listener``; StreamOutput.index tells them apart. A grammar compiles once the requests
        have a place in the queue (QueuedRequest.prepare). ``streams``: see Request. Raises BadRequest.
        """
        if not isinstance(params, SamplingParams):
            raise BadRequest(f"params: must be SamplingParams, received {type(params).__name__}")
        arrival_time = time.monotonic()
        params = params.checked()
        limits = self._bundle.limits
        deadline = None if params.timeout_s is None else arrival_time + params.timeout_s
        ids, images = self._prompts.read(
            prompt, deadline, client, last=self._last_tokens(params), salt=params.cache_salt
        )
        room = limits.length - len(ids)
        defaults = dict(self._defaults)
        if "max_tokens" in defaults:  # a recommendation for prompts of any length
            defaults["max_tokens"] = min(room, defaults["max_tokens"])
        params = params.over(defaults) if defaults else params
        if params.max_tokens is not None and params.max_tokens > room:
            raise ContextLengthExceeded.of(
                "max_tokens",
                f"the prompt has {len(ids)} tokens, and an output of {quoted(params.max_tokens)} was asked for; ask "
                f"for at most {room} or build the bundle with a larger limits.length",
                length=limits.length,
                prompt_tokens=len(ids),
                max_tokens=params.max_tokens,
            )
        require_fit(params, self._bundle.manifest, self._num_draft_tokens)
        if params.rule == "synthetic" and not self._options.synthetic_rule:
            raise BadRequest(
                "rule: synthetic accepts drafts regardless of the target, for benchmarks, and is disabled here; "
                "open the bundle with synthetic_rule"
            )
        if images is not None and params.prompt_logprobs is not None:
            raise BadRequest(
                f"prompt_logprobs: a prompt with images has none, received {params.prompt_logprobs}; leave it out"
            )
        scored = params.prompt_logprobs is not None and len(ids) > 1
        if params.n + scored > (most := self._options.queue_limit + limits.batch):
            raise BadRequest(
                f"n: slots ({limits.batch}) and queue must hold all outputs of a prompt, {most - scored} in all"
                f"{' plus one request for prompt_logprobs' if scored else ''}, received {params.n}; ask for fewer or "
                "raise queue_limit"
            )
        max_tokens = room if params.max_tokens is None else params.max_tokens
        RequestSize().add(params, len(ids), max_tokens)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        collector = None if params.prompt_logprobs is None else PromptLogprobsCollector(listener, pending=scored)
        requests = [
            Request(
                ids,
                params,
                seed=(seed + index) % 2**64,
                max_tokens=max_tokens,
                num_draft_tokens=self._num_draft_tokens if params.num_draft_tokens is None else params.num_draft_tokens,
                draft_temperature=self._draft_temperature(params),
                client=client,
                listener=listener if collector is None else collector.on_output,
                arrival_time=arrival_time,
                index=index,
                streams=streams,
                images=images,
            )
            for index in range(params.n)
        ]
        constraints, prepare = self._constraints(ids, params, max_tokens, client, deadline)
        if self._tower is not None and images is not None:
            constraints, prepare = self._tower.run_before(images, constraints, prepare, client)
        queued = [self._queued(request, requests[0], each) for request, each in zip(requests, constraints, strict=True)]
        queued[0] = replace(queued[0], prepare=prepare)
        if collector is not None:
            collector.requests = requests
        if collector is not None and scored:
            scoring = scoring_request(
                requests[0],
                collector,
                vocab=self._bundle.vocab,
                valid_tokens=self._bundle.valid_tokens,
                tokenizer=self._tokenizer.backend,
                arrival_time=arrival_time,
            )
            queued.append(scoring)
        requests[0].others = [each.request for each in queued[1:]]
        return queued

    def hold_images(self, request: Request) -> None:
        """Count the memory of a request's images until it ends. Raises QueueFull if other requests need it."""
        if self._image_memory is not None and request.images is not None:
            self._image_memory.hold(request.images)

    def _last_tokens(self, params: SamplingParams) -> int | None:
        """Return how many tokens at the end of a prompt are used; None: all."""
        if params.truncate_prompt_tokens == -1:
            return max(1, self._bundle.limits.length - (params.max_tokens or 1))
        return params.truncate_prompt_tokens

    def close(self) -> None:
        """Stop the compiler's threads and the worker processes."""
        with self._lock:
            self._closed = True
        if self._grammars is not None:
            self._grammars.close()
        if self._tower is not None:
            self._tower.close()
        self._processes.close()
        if self._image_processes is not None:
            self._image_processes.close()

    def _grammar_library(self) -> "GrammarLibrary":
        """Return the library of grammars, opened on first use: its modules take long to import. Raises Closed."""
        with self._lock:
            if self._closed:
                raise Closed("this runtime was closed; open the bundle again")
            if self._grammars is None:
                from tandemrt.runtime.grammars.library import GrammarLibrary
                from tandemrt.runtime.grammars.sources import load_modules

                self._grammars = GrammarLibrary(
                    self._vocabulary.result(),
                    stop_ids=self._bundle.stop_ids,
                    timeout_s=self._options.grammar_timeout_s,
                    max_source_bytes=self._options.max_grammar_bytes,
                    slowest_row_s=self._options.fill_timeout_s,
                    processes=ProcessLanes(opening=(load_modules, ())),
                )
            return self._grammars

    def _queued(self, request: Request, first: Request, constraints: "Future[RequestConstraints]") -> QueuedRequest:
        params = request.params
        hashes = self._hashes(request)
        # Other outputs wait for the first one's prefill only if they can reuse a block of it.
        reusable = hashes is not None and len(request.prompt) - 1 - hashes.lookahead >= BLOCK_SIZE
        return QueuedRequest(
            request,
            constraints,
            TextStream(
                self._tokenizer.backend,
                params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special=params.skip_special_tokens,
            ),
            Penalties(request.prompt, params) if params.adjusts_logits else None,
            hashes,
            leader=first if reusable and request is not first else None,
        )

    def _draft_temperature(self, params: SamplingParams) -> float:
        draft, scale = self._bundle.draft.default_sampling, params.draft_temperature_scale
        below = draft.greedy_below if params.draft_greedy_below is None else params.draft_greedy_below
        if (params.draft_sampling or draft.sampling) == "greedy" or params.temperature < below:
            return 0.0
        return params.temperature * (draft.temperature_scale if scale is None else scale)

    def _hashes(self, request: Request) -> BlockHashes | None:
        if self._digest is None:
            return None
        ids, draft = request.prompt, self._bundle.draft
        hashes = BlockHashes(
            self._digest,
            request.params.cache_salt,
            lookahead=draft.lookahead,
            undrafted=draft.traits.skips_undrafted and request.num_draft_tokens == 0 < self._num_draft_tokens,
            images=() if request.images is None else request.images.spans,
        )
        # Computed here to save the engine loop the work.
        hashes.first(ids, max(0, len(ids) - hashes.lookahead) // BLOCK_SIZE)
        return hashes

    def _constraints(
        self, ids: list[int], params: SamplingParams, max_tokens: int, client: Client, deadline: float | None
    ) -> "tuple[list[Future[RequestConstraints]], Callable[[], None]]":
        """Return the constraints of every output, and a function that starts to compile their grammar.

        The outputs share bad words and the compiled grammar.
        """
        thinking, budget = self._thinking, params.thinking_token_budget
        if thinking is not None and budget is not None:
            thinking = replace(thinking, budget=budget)
        stop_ids = (*(() if params.ignore_eos else self._bundle.stop_ids), *params.stop_token_ids)

        encoded = [word.encode() for word in params.bad_words]
        words = BadWords(encoded, self._vocabulary.result(), self._bundle.vocab) if encoded else None

        def constraint(grammar: Grammar | None) -> Constraint:
            return Constraint(
                self._bundle.vocab,
                stop_ids,
                prompt=ids,
                thinking=thinking,
                grammar=grammar,
                min_tokens=params.min_tokens,
                max_tokens=max_tokens,
                banned=params.banned_token_ids,
                allowed=params.allowed_token_ids,
                valid_tokens=self._bundle.valid_tokens,
                bad_words=words,
            )

        outputs: list[Future[RequestConstraints]] = [Future() for _ in range(params.n)]
        plain = constraint(None)  # raises now for invalid parameters, before the grammar compiles
        if params.structured_outputs is None:
            for index, ready in enumerate(outputs):
                ready.set_result(RequestConstraints(constraint(None) if index else plain))
            return outputs, lambda: None
        grammars = self._grammar_library()
        source = grammars.read(params.structured_outputs, client, deadline)
        # A future keeps its callbacks. None of them may keep the outputs: the state of a grammar has up to 100 MB, and
        # would stay in a reference cycle after the end of its request.
        undelivered, cancellations = deque(outputs), count(1)

        def deliver(compiled: "Future[Compiled]") -> None:
            while undelivered:
                ready = undelivered.popleft()
                if not ready.set_running_or_notify_cancel():
                    continue
                try:
                    # A grammar ends with a stop token; with ignore_eos it still may once it is complete.
                    grammar = compiled.result()
                    check = grammar.check
                    validate = None if check is None else partial(grammars.validate, check, client=client)
                    limit = GrammarTimeLimit(self._options.fill_timeout_s)
                    ready.set_result(RequestConstraints(constraint(grammar.matcher(stop_ids or None)), validate, limit))
                except BaseException as error:  # the future must become done in any case
                    ready.set_exception(error)

        def prepare() -> None:
            try:
                compiled = grammars.compile(source, client)
            except BaseException as error:  # the requests are queued: they end with it
                compiled = Future()
                compiled.set_exception(error)

            def abandon(ready: "Future[RequestConstraints]") -> None:
                if ready.cancelled() and next(cancellations) == params.n:
                    grammars.abandon(compiled)

            for ready in outputs:
                ready.add_done_callback(abandon)
            compiled.add_done_callback(deliver)

        return outputs, prepare

    def _thinking_rule(self) -> ThinkingRule | None:
        """Return the rule of the bundle's reasoning blocks without a budget; None: a bundle without delimiters.

        Raises BadBundle if the delimiters contradict each other or the stop tokens.
        """
        delimiters, bundle, rule = self._bundle.reasoning, self._bundle, None
        try:
            if delimiters is not None:
                rule = ThinkingRule(
                    delimiters.think_start.ids,
                    tuple(end.ids for end in delimiters.think_ends),
                    delimiters.forced_end.ids,
                    implicit_ends=tuple(end.ids for end in delimiters.implicit_ends),
                    vocabulary=self._vocabulary.result(),
                )
            Constraint(bundle.vocab, bundle.stop_ids, thinking=rule, valid_tokens=bundle.valid_tokens)
        except BadRequest as error:
            raise BadBundle(
                f"bundle {bundle.name!r}: reasoning delimiters and stop tokens disagree: {error}"
            ) from error
        return rule
