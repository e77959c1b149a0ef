"""Compare texts of the same requests under everything that must not change them (docs/invariance.md)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.check.result import CheckResult, passed_if
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.prompt import Prompt
from tandemrt.runtime.requests.request import RequestOutput

_COUNT = 24  # built-in prompts
_PROMPT, _OUTPUT = 600, 96  # tokens, at most
_REFERENCE = "all requests together, without drafts and prefix cache"
_TEMPERATURES = (0.0, 0.8)
_NAMED = 5  # differing texts that a result names


@dataclass(frozen=True)
class _Requests:
    """Prompts and, for each, the parameters that every run shares."""

    prompts: list[Prompt]
    params: list[SamplingParams]

    def run(
        self,
        llm: LLM,
        *,
        num_draft_tokens: int | None = None,
        together: int | None = None,
        after: "_Requests | None" = None,
    ) -> list[RequestOutput]:
        """Generate every text, ``together`` requests at a time (None: all).

        ``after``: as many requests; those of the same places run immediately before.
        """
        params = [each.model_copy(update={"num_draft_tokens": num_draft_tokens}) for each in self.params]
        step = together or len(params)
        outputs: list[RequestOutput] = []
        for first in range(0, len(params), step):
            group = slice(first, first + step)
            if after is not None:
                llm.generate(after.prompts[group], after.params[group])
            outputs += llm.generate(self.prompts[group], params[group])
        return outputs

    def next_turns(self, outputs: Sequence[RequestOutput], length: int) -> "tuple[_Requests, _Requests]":
        """Return the requests whose texts leave room in ``length``, and requests whose prompts are these texts."""
        texts = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
        fits = [number for number, text in enumerate(texts) if len(text) + min(_OUTPUT, length // 4) <= length]
        params = [self.params[number] for number in fits]
        return (
            _Requests([self.prompts[number] for number in fits], params),
            _Requests([texts[number] for number in fits], params),
        )


def check_invariance(path: Path, options: RuntimeOptions, prompts: Sequence[Prompt] | None) -> Iterator[CheckResult]:
    """Generate the texts of ``prompts`` (None: random ones) in many ways, and yield a comparison for each.

    The ways: every draft window, batch sizes, prompt chunks, the prefix cache, a chat's next turn, and preemption. A
    bundle for a GPU without batch invariance promises nothing: its results are measured, not passed or failed. Raises
    as ``LLM`` does.
    """
    bundle = Bundle.open(path)
    limits = bundle.limits
    with _open(bundle, options, prefix_caching=False) as llm:
        promised = device_of(llm.loop.streams.device).on_host or bundle.engine("target").batch_invariant
        requests = _requests(bundle, prompts)
        wanted = requests.run(llm, num_draft_tokens=0)
        texts = _Comparison(wanted, promised)
        largest = limits.num_draft_tokens if options.max_draft_tokens is None else options.max_draft_tokens
        for window in range(1, largest + 1):
            yield texts.compare(_count(window, "drafted token"), requests.run(llm, num_draft_tokens=window))
        for together in _sizes(min(limits.batch, len(wanted))):
            yield texts.compare(f"{_count(together, 'request')} at a time", requests.run(llm, together=together))
        turns, next_turns = requests.next_turns(wanted, limits.length)
        second = _Comparison(next_turns.run(llm), promised) if turns.params else None
    for chunk in sorted({min(each, limits.prefill_chunk) for each in (37, BLOCK_SIZE, 256)}):
        with _open(bundle, options, prefix_caching=False, prefill_chunk=chunk) as llm:
            yield texts.compare(f"prompts in chunks of {chunk} tokens while others decode", requests.run(llm))
    with _open(bundle, options, prefix_caching=True) as llm:
        yield texts.compare("an empty prefix cache", requests.run(llm))
        # A linear cache keeps a prompt until the next request joins its slot.
        again = requests.run(llm, together=limits.batch, after=requests)
        yield texts.compare("prompts in the prefix cache", again, cached=True)
        if second is not None:
            how = "a next turn whose first turn is in the prefix cache"
            yield second.compare(how, next_turns.run(llm, together=limits.batch, after=turns), cached=True)
    yield from _preempted(bundle, options, requests, texts)


def _open(bundle: Bundle, options: RuntimeOptions, **changes: Any) -> LLM:
    return LLM(bundle.folder, **RuntimeOptions(**{**options.arguments(), **changes}).arguments())


def _preempted(
    bundle: Bundle, options: RuntimeOptions, requests: _Requests, texts: "_Comparison"
) -> Iterator[CheckResult]:
    """Run with memory for few requests, so that some are preempted and resume."""
    check = "preempted requests"
    if bundle.limits.cache_blocks is None:
        yield CheckResult(check, _REFERENCE, "a linear cache preempts no request", "not applicable")
        return
    longest = max(len(output.prompt_token_ids) + len(output.token_ids) for output in texts.wanted)
    tokens = max(bundle.limits.capacity, 2 * longest)
    with _open(bundle, options, prefix_caching=False, cache_tokens=tokens) as llm:
        outputs = requests.run(llm)
        preemptions = llm.metrics.preemptions
    if preemptions:
        yield texts.compare(f"{check}, {preemptions} times", outputs)
    else:
        yield CheckResult(check, _REFERENCE, f"memory for {tokens} tokens preempted no request", "not applicable")


@dataclass(frozen=True)
class _Comparison:
    """The texts of a reference run; ``promised``: others must equal them."""

    wanted: list[RequestOutput]
    promised: bool

    def compare(self, how: str, outputs: list[RequestOutput], *, cached: bool = False) -> CheckResult:
        """Compare the texts. ``cached``: tokens of prompts must come from the prefix cache, or nothing is compared."""
        check, places = f"texts: {how}", {}
        hits = sum(output.num_cached_tokens for output in outputs)
        if cached and not hits:
            return CheckResult(check, _REFERENCE, "no token of a prompt came from the cache", "not applicable")
        for number, (one, other) in enumerate(zip(self.wanted, outputs, strict=True)):
            if (one.token_ids, one.finish_reason) != (other.token_ids, other.finish_reason):
                same = (a == b for a, b in zip(one.token_ids, other.token_ids, strict=False))
                shorter = min(len(one.token_ids), len(other.token_ids))
                places[number] = next((at for at, equal in enumerate(same) if not equal), shorter)
        errors = [output.error for output in (*self.wanted, *outputs) if output.finish_reason == "error"]
        tokens = sum(len(output.token_ids) for output in outputs)
        result = f"{len(outputs) - len(places)} of {len(outputs)} texts equal, {tokens} tokens"
        result += f", {hits} prompt tokens from the cache" if cached else ""
        result += "".join(f"; text {number} parts at token {at}" for number, at in list(places.items())[:_NAMED])
        result += f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
        result += f"; {len(errors)} ended in an error: {errors[0]}" if errors else ""
        verdict = passed_if(not places and not errors) if self.promised or errors else "measured"
        numbers = {
            "texts": len(outputs),
            "parted": len(places),
            "tokens": tokens,
            **({"cached": hits} if cached else {}),
        }
        return CheckResult(check, _REFERENCE, result, verdict, numbers)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _sizes(most: int) -> list[int]:
    """Return 1, 2, 4, … and ``most``."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})


def _requests(bundle: Bundle, custom: Sequence[Prompt] | None) -> _Requests:
    """Return ``given`` prompts, or random ones of all lengths; greedy and sampled in turns."""
    limits, draw = bundle.limits, Random(7)
    # A prompt should fill a block of the prefix cache, and leave room for a next turn.
    longest = max(1, min(_PROMPT, max(limits.length // 4, min(BLOCK_SIZE + 32, limits.length // 2))))
    output = max(1, min(_OUTPUT, limits.length // 4))
    delimiters = bundle.reasoning
    control = {*(delimiters.think_start.ids if delimiters else ()), *bundle.stop_ids}
    tokens = [token for token in range(bundle.valid_tokens) if token not in control]
    lengths = [1 + (longest - 1) * number // (_COUNT - 1) for number in range(_COUNT)]
    prompts: list[Prompt] = [[draw.choice(tokens) for _ in range(length)] for length in lengths]
    chosen = prompts if custom is None else list(custom)
    params = [
        SamplingParams(temperature=_TEMPERATURES[number % 2], seed=number, max_tokens=output, ignore_eos=custom is None)
        for number in range(len(chosen))
    ]
    return _Requests(chosen, params)
