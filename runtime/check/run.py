"""All checks of a bundle on one device, one after the other; one that breaks does not hide the others."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.drafts import DRAFTS
from tandemrt.engines.dtypes import FLOAT8
from tandemrt.engines.errors import TandemError
from tandemrt.engines.manifest import EngineName
from tandemrt.engines.options import RuntimeOptions
from tandemrt.runtime.backends.base import Engine
from tandemrt.runtime.check.baseline import open_baseline, open_whole_cache, rounds_to_8_bits
from tandemrt.runtime.check.beside import check_beside
from tandemrt.runtime.check.finding import Finding, judged
from tandemrt.runtime.check.logits import ROUNDED, TOLERANCES, check_logits, check_poison, measure_cache
from tandemrt.runtime.check.memory import measure_memory, used
from tandemrt.runtime.check.operators import check_operators
from tandemrt.runtime.check.replay import check_replay
from tandemrt.runtime.check.texts import check_texts
from tandemrt.runtime.check.walk import Plan, expected, is_decoder
from tandemrt.runtime.llm import LLM

DEFAULTS = RuntimeOptions()


def check_bundle(
    path: Path, options: RuntimeOptions = DEFAULTS, *, beside: Path | None = None, text: str = ""
) -> Iterator[Finding]:
    """Open the bundle at ``path`` as ``options`` say and yield what every check found.

    With ``beside``, another bundle of the same vocabulary, also what both make of ``text``. Raises BadBundle or
    BackendUnavailable if one cannot be opened at all.
    """
    bundle = Bundle.open(path)
    other = None if beside is None else Bundle.open(beside)
    problems = bundle.problems(verify=True)
    yield Finding(
        "files",
        "digests in the manifest",
        "; ".join(problems) or f"{len(bundle.manifest.files)} files are as they were built, weights included",
        judged(not problems),
    )
    before = used()
    with LLM(bundle.folder, **options.given()) as llm:
        after = used()
        with llm.loop.clock.active():
            yield from check_engines(bundle, llm.loop.tandem.engines, options.threads)
        yield from guarded("texts with speculation", partial(check_texts, llm))
        yield from guarded("memory", partial(measure_memory, llm.loop, before, after))
    if other is not None:
        yield from guarded("text beside another bundle", partial(check_beside, bundle, other, options, text))


def check_engines(bundle: Bundle, engines: Mapping[str, Engine], threads: int | None) -> Iterator[Finding]:
    """Check ``engines``, however they were opened, against the graphs of ``bundle`` and the definitions."""
    limits = bundle.limits
    plan = Plan.of(limits, bundle.valid_tokens)

    def decoder(name: EngineName, engine: Engine) -> Iterator[Finding]:
        rows, length = len(plan.tokens), len(plan.tokens[0])
        largest = {"batch": rows, "query": length, "rows": length, "tokens": rows * length}
        wanted = expected(open_baseline(bundle, name, threads, largest), plan)
        tolerance = ROUNDED if rounds_to_8_bits(bundle, name) else TOLERANCES[engine.contract["logits"].dtype]
        yield check_logits(name, engine, wanted, plan, tolerance)
        if bundle.contract(name)["past_key.0"].dtype == FLOAT8:
            yield measure_cache(name, wanted, expected(open_whole_cache(bundle, name, threads, largest), plan))

    # What a block gives depends on the whole of it, and its context on features: there is no text to be led along.
    led = [
        name
        for name in bundle.manifest.engines
        if not DRAFTS[bundle.draft.kind].block or name not in ("draft", "context", "markov")
    ]
    if len(led) < len(bundle.manifest.engines):
        why = "a block draft is compared in the texts alone"
        yield Finding("logits of draft", "its graph", why, "not applicable")
    for name in led:
        engine = engines[name]
        if not is_decoder(engine.contract):
            continue
        yield from guarded(f"logits of {name}", partial(decoder, name, engine))
        yield from guarded(f"poisoned cache of {name}", partial(check_poison, name, engine, plan))
    yield from guarded("verification and drafting", partial(check_operators, engines, limits))
    for name in led:
        yield from guarded(f"graph replay of {name}", partial(check_replay, name, engines[name], limits, plan))


def guarded(check: str, findings: Callable[[], Finding | Iterable[Finding]]) -> Iterator[Finding]:
    """Yield what ``findings`` gives; an error on the way is a finding itself."""
    try:
        given = findings()
        yield from [given] if isinstance(given, Finding) else given
    except Exception as error:  # whatever an engine raises is what a check is for
        text = str(error) if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
        yield Finding(check, "", text, "fail")
