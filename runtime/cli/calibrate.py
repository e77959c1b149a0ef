"""The command that finds out at what temperature a draft is best drawn: temperature scaling.

After Guo et al., "On Calibration of Modern Neural Networks" (2017), with accepted drafts in the place of a loss.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.command_options import takes_options
from tandemrt.engines.drafts import DRAFTS
from tandemrt.engines.errors import BadRequest, InternalError
from tandemrt.engines.options import RuntimeOptions
from tandemrt.engines.params import SamplingParams
from tandemrt.runtime.cli.arguments import BundlePath, read_prompts, require_bundle_fit

if TYPE_CHECKING:
    from tandemrt.runtime.llm import LLM
    from tandemrt.runtime.requests.prompt import Prompt

SCALES = (1.0, 1.4, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1)  # 1 first: with equal figures, drafts stay as they are


@takes_options(leave_out=("queue_limit", "profile", "adaptive_window"))  # its windows would follow the scale
def calibrate(
    bundle: BundlePath,
    prompts: Annotated[Path, typer.Option(help="JSON lines with `prompt` (text) or `messages`.")],
    requests: Annotated[int, typer.Option(min=1, help="How many of them, at most.")] = 40,
    max_tokens: Annotated[int, typer.Option(min=2, help="At most so many output tokens of each.")] = 100,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Of the requests; may be given several times; default: 0.7 and 1.")
    ] = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Find the scale of the draft's temperature at which most drafts are accepted, for [draft] in the recipe."""
    temperatures = sorted(set(temperature or (0.7, 1.0)))
    if temperatures[0] <= 0:
        raise BadRequest(f"--temperature: must be above 0, where drafts are drawn, received {temperatures[0]:g}")
    asked = {
        each: SamplingParams(
            temperature=each,
            max_tokens=max_tokens,
            draft_sampling="coupled",
            draft_greedy_below=0.0,
            draft_temperature_scale=1.0,
        )
        for each in temperatures
    }
    given, schemas = read_prompts(prompts, requests)
    if any(schema is not None for schema in schemas):
        raise BadRequest("--prompts: must have no `schema`: drafts are measured over free texts; take it out")
    draft, window = Bundle.read(bundle).manifest.draft.kind, options.largest_window
    if not DRAFTS[draft].draws:
        raise BadRequest(f"BUNDLE: must have a draft that is drawn from a law, received one with draft {draft!r}")
    if window == 0:
        raise BadRequest("--window: must be above 0, where drafts are drawn, received 0; leave it out")
    require_bundle_fit(bundle, options, *asked.values())
    from tandemrt.runtime.llm import LLM

    console = Console()
    with LLM(bundle, **options.given()) as llm, Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(SCALES) * len(asked))
        lengths = acceptance_lengths(llm, given, asked, on_run=lambda: progress.advance(task))
    table = Table("temperature_scale", *(f"at {each:g}" for each in asked), "mean", show_edge=False)
    means = {scale: sum(lengths[scale]) / len(asked) for scale in SCALES}
    best = max(means, key=lambda scale: means[scale])
    for scale in sorted(SCALES):
        figures = (f"{length:.2f}" for length in (*lengths[scale], means[scale]))
        table.add_row(f"{scale:g}", *figures, style="bold" if scale == best else "")
    console.print(table)
    gain = means[best] / means[1.0]
    console.print(f"temperature_scale = {best:g}: acceptance length {gain:.3f} times that of 1", highlight=False)


def acceptance_lengths(
    llm: "LLM",
    prompts: Sequence["Prompt"],
    asked: Mapping[float, SamplingParams],
    *,
    on_run: Callable[[], None] = lambda: None,
) -> dict[float, list[float]]:
    """Return tokens per request and round for each of SCALES, in the order of ``asked``, parameters by temperature.

    The rule is coupled, so the texts are the same whatever the scale, and so is the seed of each prompt: what differs
    between scales are the drafts alone. (On a GPU texts part at ties, and differ in little more.)

    Raises InternalError if a request fails.
    """
    found: dict[float, list[float]] = {}
    for scale in SCALES:
        for params in asked.values():
            before = llm.metrics.copy()
            changes = [{"seed": seed, "draft_temperature_scale": scale} for seed in range(len(prompts))]
            outputs = llm.generate(list(prompts), [params.model_copy(update=each) for each in changes])
            if failed := next((each.error for each in outputs if each.finish_reason == "error"), None):
                raise InternalError(f"a request failed at temperature_scale {scale:g}: {failed}")
            spent = llm.metrics.since(before)
            found.setdefault(scale, []).append(1 + sum(spent.accepted) / max(1, spent.steps))
            on_run()
    return found
