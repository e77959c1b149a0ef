"""``tandemrt calibrate``: find the temperature scale of the draft at which the target accepts most draft tokens.

Temperature scaling after Guo et al., "On Calibration of Modern Neural Networks" (2017), with the acceptance length in
place of the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS
from tandemrt.engines.options.command_options import takes_options
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest, InternalError
from tandemrt.runtime.cli.arguments import BundlePath, read_prompts, require_bundle_fit

if TYPE_CHECKING:
    from tandemrt.runtime.llm.llm import LLM
    from tandemrt.runtime.requests.prompt import Prompt

SCALES = (1.0, 1.4, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1)  # 1 first, so that it wins ties


# The draft length would depend on the scale.
@takes_options(leave_out=("queue_limit", "profile", "adaptive_draft_tokens", "lookup"))
def calibrate(
    bundle: BundlePath,
    prompts: Annotated[
        Path, typer.Option(help="JSON lines with `prompt` (text) or `messages`, and optionally `schema`.")
    ],
    requests: Annotated[int, typer.Option(min=1, help="Use at most this many prompts.")] = 40,
    max_tokens: Annotated[int, typer.Option(min=2, help="Largest number of output tokens per prompt.")] = 100,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Temperature of the requests; repeat it for several; default: 0.7 and 1.")
    ] = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Find the best temperature_scale for the recipe's draft section. With it, the target accepts most draft tokens."""
    temperatures = sorted(set(temperature or (0.7, 1.0)))
    if temperatures[0] <= 0:
        raise BadRequest(f"--temperature: must be above 0, so that drafts are sampled, received {temperatures[0]:g}")
    params = {
        each: SamplingParams(
            temperature=each,
            max_tokens=max_tokens,
            draft_sampling="coupled",
            draft_greedy_below=0.0,
            draft_temperature_scale=1.0,
        )
        for each in temperatures
    }
    texts, schemas = read_prompts(prompts, requests)
    constraints = [None if schema is None else StructuredOutputs(json=schema) for schema in schemas]
    draft, window = Bundle.read(bundle).manifest.draft.kind, options.max_draft_tokens
    if not DRAFT_KINDS[draft].samples:
        raise BadRequest(
            f"BUNDLE: must have a draft that is sampled from a distribution, received one with draft {draft!r}"
        )
    if window == 0:
        raise BadRequest("--num-draft-tokens: must be above 0, so that there are drafts, received 0; leave it out")
    require_bundle_fit(bundle, options, *params.values())
    from tandemrt.runtime.llm.llm import LLM

    console = Console()
    fixed = options.arguments() | {"adaptive_draft_tokens": False, "lookup": False}
    with LLM(bundle, **fixed) as llm, Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(SCALES) * len(params))
        lengths = acceptance_lengths(llm, texts, params, constraints=constraints, on_run=lambda: progress.advance(task))
    table = Table("temperature_scale", *(f"at {each:g}" for each in params), "mean", show_edge=False)
    means = {scale: sum(lengths[scale]) / len(params) for scale in SCALES}
    best = max(means, key=lambda scale: means[scale])
    for scale in sorted(SCALES):
        figures = (f"{length:.2f}" for length in (*lengths[scale], means[scale]))
        table.add_row(f"{scale:g}", *figures, style="bold" if scale == best else "")
    console.print(table)
    console.print(recommendation(means), highlight=False, soft_wrap=True)


def recommendation(means: Mapping[float, float]) -> str:
    """Return what to write into the recipe, from the mean acceptance length of each scale."""
    best = max(means, key=lambda scale: means[scale])
    if best == 1:
        return "no other scale accepts more than 1, the default: leave temperature_scale out of the recipe"
    return f"temperature_scale = {best:g}: acceptance length {means[best] / means[1.0]:.3f} times that of 1"


def acceptance_lengths(
    llm: "LLM",
    prompts: Sequence["Prompt"],
    params: Mapping[float, SamplingParams],
    *,
    constraints: Sequence[StructuredOutputs | None],
    on_run: Callable[[], None] = lambda: None,
) -> dict[float, list[float]]:
    """Return the acceptance lengths (tokens per request and round) of each of SCALES, in the order of ``params``.

    ``params`` are by temperature, ``constraints`` by prompt. With the coupled rule and fixed seeds the texts do not
    depend on the scale, so only the drafts differ. (On a GPU texts may also differ at ties.)
    Raises InternalError if a request fails.
    """
    lengths: dict[float, list[float]] = {}
    for scale in SCALES:
        for each in params.values():
            before = llm.metrics.copy()
            changes = [
                {"seed": seed, "draft_temperature_scale": scale, "structured_outputs": constraint}
                for seed, constraint in enumerate(constraints)
            ]
            outputs = llm.generate(list(prompts), [each.model_copy(update=change) for change in changes])
            if failed := next((output.error for output in outputs if output.finish_reason == "error"), None):
                raise InternalError(f"a request failed at temperature_scale {scale:g}: {failed}")
            lengths.setdefault(scale, []).append(llm.metrics.since(before).acceptance_length)
            on_run()
    return lengths
