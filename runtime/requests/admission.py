"""From what a caller asked to a request that can run, or to a refusal that says why not."""

import secrets
import time
from concurrent.futures import Future
from functools import partial

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.contract import BLOCK_SIZE
from tandemrt.engines.drafts import DRAFTS
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
from tandemrt.runtime.constraints.phases import Grammar
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.grammars.library import Compiled, GrammarLibrary
from tandemrt.runtime.grammars.output import OutputCheck
from tandemrt.runtime.processes.pool import ProcessPool
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.prompt import Prompt, PromptReader
from tandemrt.runtime.requests.request import Listener, Request
from tandemrt.runtime.requests.share import GrammarShare
from tandemrt.runtime.requests.text import Transcript
from tandemrt.runtime.requests.waiting import Enforcement, Waiting


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

    def admit(self, prompt: Prompt, params: SamplingParams, listener: Listener, *, client: str = "") -> Waiting:
        """Return a request ready for the queue; its grammar may still be compiling. Raises BadRequest."""
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
        max_tokens = room if params.max_tokens is None else params.max_tokens
        request = Request(
            ids,
            params,
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            max_tokens=max_tokens,
            window=self._window if params.window is None else params.window,
            greedy_drafts=self._drafts_greedily(params),
            client=client,
            listener=listener,
            called=called,
        )
        return Waiting(
            request,
            self._enforcement(ids, params, max_tokens, client),
            Transcript(
                self._tokenizer.backend,
                params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special=params.skip_special_tokens,
            ),
            Penalties.of(ids, params),
            self._hashes(ids, params.cache_salt, request.window),
        )

    def close(self) -> None:
        """Let the compiler's threads end, and the processes."""
        self._grammars.close()
        self._processes.close()

    def _drafts_greedily(self, params: SamplingParams) -> bool:
        draft = self._bundle.draft
        below = draft.greedy_below if params.draft_greedy_below is None else params.draft_greedy_below
        return (params.draft_sampling or draft.sampling) == "greedy" or params.temperature < below

    def _hashes(self, ids: list[int], salt: str | None, window: int) -> BlockHashes | None:
        if self._digest is None:
            return None
        kind = self._bundle.draft.kind
        undrafted = kind == "model" and window == 0 < self._window
        hashes = BlockHashes(self._digest, salt, behind=DRAFTS[kind].behind, undrafted=undrafted)
        hashes.first(ids, max(0, len(ids) - hashes.behind) // BLOCK_SIZE)  # here rather than in the loop
        return hashes

    def _enforcement(
        self, ids: list[int], params: SamplingParams, max_tokens: int, client: str
    ) -> "Future[Enforcement]":
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

        ready: Future[Enforcement] = Future()
        plain = constraint(None)  # refuses at once what does not depend on a grammar
        if params.structured_outputs is None:
            ready.set_result(Enforcement(plain))
            return ready

        def start(compiled: "Future[Compiled]") -> None:
            if not ready.set_running_or_notify_cancel():
                return
            try:
                # A grammar ends with a stop token; with ignore_eos it still may, where it is complete.
                grammar = compiled.result()
                check = None if grammar.check is None else partial(self._check, client, grammar.check)
                share = GrammarShare(self._options.fill_timeout_s)
                ready.set_result(Enforcement(constraint(grammar.matcher(stop_ids or None)), check, share))
            except BaseException as error:  # whoever waits must hear of any
                ready.set_exception(error)

        def abandoned(given: "Future[Enforcement]") -> None:
            if given.cancelled():
                self._grammars.abandon(compiled)

        compiled = self._grammars.compile(params.structured_outputs, client)
        ready.add_done_callback(abandoned)
        compiled.add_done_callback(start)
        return ready

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
