"""From what a caller asked to a request that can run, or to a refusal that says why not."""

import secrets
import time
from concurrent.futures import Future
from functools import partial

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.contract import BLOCK_SIZE
from tandemrt.engines.errors import BadBundle, BadRequest, quoted
from tandemrt.engines.fit import require_fit
from tandemrt.engines.generation_config import recommended
from tandemrt.engines.options import RuntimeOptions
from tandemrt.engines.params import SamplingParams
from tandemrt.engines.tokenizer import Tokenizer
from tandemrt.engines.vocabulary import Vocabulary
from tandemrt.runtime.caches.hashes import BlockHashes
from tandemrt.runtime.constraints.bad_words import BadWords
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.grammar import Grammar
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.grammars.library import Compiled, GrammarLibrary
from tandemrt.runtime.grammars.output import OutputCheck
from tandemrt.runtime.processes.pool import ProcessPool
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.prompt import Prompt, PromptReader
from tandemrt.runtime.requests.request import Listener, Request
from tandemrt.runtime.requests.scoring import PromptScores, Replay
from tandemrt.runtime.requests.share import GrammarShare
from tandemrt.runtime.requests.text import Transcript
from tandemrt.runtime.requests.waiting import Enforcement, Waiting

MOST_LISTED = 1 << 18  # ids that are banned and allowed, of all outputs of a request
MOST_PROMPT_LOGPROBS = 1 << 16  # values, of all outputs: they are told at once, by whoever tells everybody


class Admission:
    """Knows the bundle's limits, markers and vocabulary, and holds every request against them."""

    def __init__(
        self,
        bundle: Bundle,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        options: RuntimeOptions,
        *,
        window: int,
    ) -> None:
        self._bundle = bundle
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._defaults = recommended(bundle.tokenizer_dir) if options.generation_config else {}
        self._window = window
        self._digest = bundle.manifest.digest if options.prefix_caching else None
        self._require_rules()
        self._processes = ProcessPool()
        self._prompts = PromptReader(
            tokenizer,
            valid_tokens=bundle.valid_tokens,
            limit=bundle.limits.length - 1,
            most_bytes=options.prompt_bytes(bundle.limits),
            processes=self._processes,
            timeout_s=options.prompt_timeout_s,
        )
        self._grammars = GrammarLibrary(
            vocabulary,
            stop_ids=bundle.stop_ids,
            timeout_s=options.grammar_timeout_s,
            max_source_bytes=options.max_grammar_bytes,
            slowest_row_s=options.fill_timeout_s,
            processes=self._processes,
        )
        self._options = options

    def admit(self, prompt: Prompt, params: SamplingParams, listener: Listener, *, client: str = "") -> list[Waiting]:
        """Return requests ready for the queue, one for each output; their grammar may still be compiling.

        They have one ``listener``, which tells them apart by StreamOutput.index. Raises BadRequest.
        """
        if not isinstance(params, SamplingParams):
            raise BadRequest(f"params: must be SamplingParams, received {type(params).__name__}")
        called = time.monotonic()
        params = params.checked()
        limits = self._bundle.limits
        ids = self._prompts.read(prompt, None if params.timeout_s is None else called + params.timeout_s, client)
        room = limits.length - len(ids)
        defaults = dict(self._defaults)
        if "max_tokens" in defaults:  # what was recommended for any prompt
            defaults["max_tokens"] = min(room, defaults["max_tokens"])
        params = params.over(defaults) if defaults else params
        if params.max_tokens is not None and params.max_tokens > room:
            raise BadRequest(
                f"max_tokens: prompt ({len(ids)}) and output must fit the engine's length {limits.length}, received "
                f"{quoted(params.max_tokens)}; ask for at most {room} or build the bundle with a larger limits.length"
            )
        require_fit(params, self._bundle.manifest, self._window)
        if params.rule == "synthetic" and not self._options.synthetic_rule:
            raise BadRequest(
                "rule: synthetic accepts drafts whatever the target says, which is for benchmarks and is switched off "
                "here; open the bundle with synthetic_rule"
            )
        scored = params.prompt_logprobs is not None and len(ids) > 1
        if params.n + scored > (most := self._options.queue_limit + limits.batch):
            raise BadRequest(
                f"n: slots ({limits.batch}) and queue must hold all outputs of a prompt, {most - scored} in all"
                f"{' beside the pass for prompt_logprobs' if scored else ''}, received {params.n}; ask for fewer or "
                "raise queue_limit"
            )
        self._require_size(params, len(ids))
        max_tokens = room if params.max_tokens is None else params.max_tokens
        seed = secrets.randbits(64) if params.seed is None else params.seed
        scores = None if params.prompt_logprobs is None else PromptScores(listener, pending=scored)
        requests = [
            Request(
                ids,
                params,
                seed=(seed + index) % 2**64,
                max_tokens=max_tokens,
                window=self._window if params.window is None else params.window,
                draft_temperature=self._draft_temperature(params),
                client=client,
                listener=listener if scores is None else scores.listen,
                called=called,
                index=index,
            )
            for index in range(params.n)
        ]
        enforcements = self._enforcements(ids, params, max_tokens, client)
        queued = [
            self._waiting(request, requests[0], enforcement)
            for request, enforcement in zip(requests, enforcements, strict=True)
        ]
        if scores is not None:
            scores.requests = requests
            queued += [self._scoring(requests[0], scores, called)] if scored else []
        requests[0].others = [waiting.request for waiting in queued[1:]]
        return queued

    def close(self) -> None:
        """Let the compiler's threads end, and the processes."""
        self._grammars.close()
        self._processes.close()

    def _require_size(self, params: SamplingParams, prompt_tokens: int) -> None:
        """Raise BadRequest where several outputs multiply what one request may ask for."""
        listed = params.n * (len(params.banned_token_ids or ()) + len(params.allowed_token_ids or ()))
        if params.n > 1 and listed > MOST_LISTED:
            raise BadRequest(
                f"n: outputs times banned_token_ids and allowed_token_ids must be at most {MOST_LISTED}, received "
                f"{listed}; ask for fewer outputs at a time"
            )
        told = 0 if params.prompt_logprobs is None else params.n * prompt_tokens * (params.prompt_logprobs + 1)
        if told > MOST_PROMPT_LOGPROBS:
            raise BadRequest(
                f"prompt_logprobs: outputs times prompt tokens times logprobs must be at most {MOST_PROMPT_LOGPROBS}, "
                f"received {told}; ask for fewer of them, or for a shorter prompt"
            )

    def _waiting(self, request: Request, first: Request, enforcement: "Future[Enforcement]") -> Waiting:
        params = request.params
        hashes = self._hashes(request.prompt, params.cache_salt, request.window)
        # Only what others can find is worth waiting for.
        shares = hashes is not None and len(request.prompt) - 1 - hashes.behind >= BLOCK_SIZE
        return Waiting(
            request,
            enforcement,
            Transcript(
                self._tokenizer.backend,
                params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special=params.skip_special_tokens,
            ),
            Penalties.of(request.prompt, params),
            hashes,
            leader=first if shares and request is not first else None,
        )

    def _scoring(self, first: Request, scores: PromptScores, called: float) -> Waiting:
        """The pass over the prompt of ``first``, of two tokens or more (see scoring.py)."""
        asked, prompt = first.params, first.prompt
        params = SamplingParams(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            logprobs=asked.prompt_logprobs,
            logprobs_law=asked.logprobs_law,
            priority=asked.priority,
            timeout_s=asked.timeout_s,
        )
        request = Request(
            prompt[:1],
            params,
            seed=first.seed,
            max_tokens=len(prompt) - 1,
            window=first.window,
            draft_temperature=0.0,
            client=first.client,
            listener=lambda item: scores.hear(request, item),
            called=called,
            scores=True,
        )
        replayed = Constraint(
            self._bundle.vocab,
            (),
            prompt=prompt[:1],
            grammar=Replay(prompt[1:]),
            max_tokens=len(prompt) - 1,
            valid_tokens=self._bundle.valid_tokens,
        )
        ready: Future[Enforcement] = Future()
        ready.set_result(Enforcement(replayed))
        return Waiting(request, ready, Transcript(self._tokenizer.backend), None)

    def _draft_temperature(self, params: SamplingParams) -> float:
        draft, scale = self._bundle.draft, params.draft_temperature_scale
        below = draft.greedy_below if params.draft_greedy_below is None else params.draft_greedy_below
        if (params.draft_sampling or draft.sampling) == "greedy" or params.temperature < below:
            return 0.0
        return params.temperature * (draft.temperature_scale if scale is None else scale)

    def _hashes(self, ids: list[int], salt: str | None, window: int) -> BlockHashes | None:
        if self._digest is None:
            return None
        kind = self._bundle.draft.kind
        undrafted = kind == "model" and window == 0 < self._window
        hashes = BlockHashes(self._digest, salt, behind=self._bundle.draft.behind, undrafted=undrafted)
        hashes.first(ids, max(0, len(ids) - hashes.behind) // BLOCK_SIZE)  # here rather than in the loop
        return hashes

    def _enforcements(
        self, ids: list[int], params: SamplingParams, max_tokens: int, client: str
    ) -> "list[Future[Enforcement]]":
        """What each of the outputs must obey; what takes long, words and grammar, is worked out once for all."""
        thinking = self._thinking(params)
        stop_ids = (*(() if params.ignore_eos else self._bundle.stop_ids), *params.stop_token_ids)

        spelled = [word.encode() for word in params.bad_words]
        words = BadWords(spelled, self._vocabulary, self._bundle.vocab) if spelled else None

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

        outputs: list[Future[Enforcement]] = [Future() for _ in range(params.n)]
        plain = constraint(None)  # refuses at once what does not depend on a grammar
        if params.structured_outputs is None:
            for index, ready in enumerate(outputs):
                ready.set_result(Enforcement(constraint(None) if index else plain))
            return outputs

        def start(compiled: "Future[Compiled]") -> None:
            for ready in outputs:
                if not ready.set_running_or_notify_cancel():
                    continue
                try:
                    # A grammar ends with a stop token; with ignore_eos it still may, where it is complete.
                    grammar = compiled.result()
                    check = None if grammar.check is None else partial(self._check, client, grammar.check)
                    share = GrammarShare(self._options.fill_timeout_s)
                    ready.set_result(Enforcement(constraint(grammar.matcher(stop_ids or None)), check, share))
                except BaseException as error:  # whoever waits must hear of any
                    ready.set_exception(error)

        def abandoned(_: "Future[Enforcement]") -> None:
            if all(ready.cancelled() for ready in outputs):
                self._grammars.abandon(compiled)

        compiled = self._grammars.compile(params.structured_outputs, client)
        for ready in outputs:
            ready.add_done_callback(abandoned)
        compiled.add_done_callback(start)
        return outputs

    def _check(self, client: str, check: OutputCheck, text: str) -> "Future[str | None]":
        what = "structured_outputs.json: checking the finished text"
        return self._processes.submit(client, what, self._options.grammar_timeout_s, check, text)

    def _require_rules(self) -> None:
        """Raise BadBundle where the bundle's markers and stop tokens would refuse every request."""
        try:
            thinking = self._thinking(SamplingParams())
            Constraint(
                self._bundle.vocab, self._bundle.stop_ids, thinking=thinking, valid_tokens=self._bundle.valid_tokens
            )
        except BadRequest as error:
            raise BadBundle(f"bundle {self._bundle.name!r}: markers and stop tokens disagree: {error}") from error

    def _thinking(self, params: SamplingParams) -> ThinkingRule | None:
        markers = self._bundle.markers
        if markers is None:
            return None
        return ThinkingRule(
            markers.start.ids,
            tuple(end.ids for end in markers.ends),
            markers.forced_end.ids,
            implicit_ends=tuple(end.ids for end in markers.implicit_ends),
            budget=params.thinking_token_budget,
            vocabulary=self._vocabulary,
        )
