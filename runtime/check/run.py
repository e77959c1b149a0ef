"""Run all checks of a bundle on one device. A check that raises does not stop the others."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.contract.dtypes import FLOAT8
from tandemrt.engines.contract.operators import WEIGHTLESS_ENGINES
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import TandemError
from tandemrt.runtime.check.compare_bundles import compare_bundles, shared_tokens
from tandemrt.runtime.check.decoder_run import DecodePlan, is_decoder, score_at_once
from tandemrt.runtime.check.logits import (
    QUANTIZED_TOLERANCE,
    TOLERANCES,
    check_logits,
    check_poisoned_cache,
    measure_float8_cache,
)
from tandemrt.runtime.check.memory import measure_memory, memory_in_use
from tandemrt.runtime.check.operators import check_operators
from tandemrt.runtime.check.reference import open_reference, open_reference_unquantized_cache, quantizes_activations
from tandemrt.runtime.check.replay import check_replay
from tandemrt.runtime.check.result import CheckResult, passed_if
from tandemrt.runtime.check.texts import check_texts
from tandemrt.runtime.check.tower import check_tower
from tandemrt.runtime.device.backends.base import Engine
from tandemrt.runtime.device.backends.opening import open_engines
from tandemrt.runtime.llm.llm import LLM


def check_bundle(
    path: Path, options: RuntimeOptions, *, compare_with: Path | None = None, text: str = ""
) -> Iterator[CheckResult]:
    """Open the bundle at ``path`` with ``options`` and yield the result of every check.

    ``compare_with`` is another bundle of the same vocabulary. Both score ``text``. Before the first check, raises
    BadBundle or BackendUnavailable if a bundle cannot be opened, and BadRequest if both cannot score the text.
    """
    bundle = Bundle.open(path)
    other = None if compare_with is None else Bundle.open(compare_with)
    tokens = [] if other is None else shared_tokens(bundle, other, options, text)
    problems = bundle.problems(verify=True)
    yield CheckResult(
        "files",
        "digests in the manifest",
        "; ".join(problems) or f"{len(bundle.manifest.files)} files are as they were built, weights included",
        passed_if(not problems),
    )
    before = memory_in_use()
    with LLM(bundle.folder, **options.arguments()) as llm:
        after = memory_in_use()
        with llm.loop.streams.active():
            opened = llm.loop.target.engines
            others = [name for name in bundle.manifest.engines if name not in opened]
            engines = opened | open_engines(bundle, llm.loop.streams.device, options.threads, others)
            yield from check_engines(bundle, engines, options.threads)
        yield from run_check("texts with speculation", partial(check_texts, llm))
        yield from run_check("memory", partial(measure_memory, llm, before, after))
    if other is not None:
        yield from run_check("text with another bundle", partial(compare_bundles, bundle, other, options, tokens))


def check_engines(bundle: Bundle, engines: Mapping[str, Engine], threads: int | None) -> Iterator[CheckResult]:
    """Check opened ``engines`` against the graphs of ``bundle`` and the definitions of the operators."""
    limits = bundle.limits
    plan = DecodePlan.within(limits, bundle.valid_tokens)

    def check_decoder(name: EngineName, engine: Engine) -> Iterator[CheckResult]:
        rows, length = len(plan.tokens), len(plan.tokens[0])
        largest = {"batch": rows, "query": length, "rows": length, "tokens": rows * length}
        expected = score_at_once(open_reference(bundle, name, threads, largest), plan)
        quantized = quantizes_activations(bundle, name)
        tolerance = QUANTIZED_TOLERANCE if quantized else TOLERANCES[engine.contract["logits"].dtype]
        yield check_logits(name, engine, expected, plan, tolerance)
        if any(each.name.startswith("past_key.") and each.dtype == FLOAT8 for each in bundle.contract(name).inputs):
            unquantized = open_reference_unquantized_cache(bundle, name, threads, largest)
            yield measure_float8_cache(name, expected, score_at_once(unquantized, plan))

    # A block draft predicts all tokens of a block at once, from the target's features. A fixed text cannot drive it.
    checked = [
        name
        for name in bundle.manifest.engines
        if not bundle.draft.traits.block or name == "target" or name in WEIGHTLESS_ENGINES
    ]
    if len(checked) < len(bundle.manifest.engines):
        why = "a block draft is compared in the texts alone"
        yield CheckResult("logits of draft", "its graph", why, "not applicable")
    for name in checked:
        engine = engines[name]
        if not is_decoder(engine.contract):
            continue
        yield from run_check(f"logits of {name}", partial(check_decoder, name, engine))
        yield from run_check(f"poisoned cache of {name}", partial(check_poisoned_cache, name, engine, plan))
    if bundle.manifest.vision is not None:
        tower = partial(check_tower, bundle, bundle.manifest.vision, engines["vision"], threads)
        yield from run_check("states of images", tower)
    yield from run_check("verification and drafting", partial(check_operators, engines, limits))
    for name in checked:
        yield from run_check(f"graph replay of {name}", partial(check_replay, name, engines[name], limits, plan))


def run_check(name: str, check: Callable[[], CheckResult | Iterable[CheckResult]]) -> Iterator[CheckResult]:
    """Yield the results of ``check``. An exception becomes a failed result called ``name``."""
    try:
        results = check()
        yield from [results] if isinstance(results, CheckResult) else results
    except Exception as error:  # an engine may raise anything
        text = str(error) if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
        yield CheckResult(name, "", text, "fail")
