"""``tandemrt check``: print the result of every check of a bundle, and write all of them as JSON."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.command_options import REQUEST_LIMITS, takes_options
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.cli.arguments import BundlePath, Report, read_prompts

if TYPE_CHECKING:
    from tandemrt.runtime.check.result import CheckResult

_COLOURS = {"pass": "green", "fail": "red", "measured": "cyan", "not applicable": "dim"}
_MAX_PROMPTS = 256
console = Console()


@takes_options(leave_out=(*REQUEST_LIMITS, "profile"))
def check(
    bundle: BundlePath,
    out: Report = None,
    compare_with: Annotated[
        Path | None, typer.Option(help="Another bundle of the same model, such as an unquantized one.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="With --compare-with: a UTF-8 text file. Both bundles score it.")
    ] = None,
    invariance: Annotated[
        bool,
        typer.Option(
            "--invariance",
            help="Only compare texts of the same requests with every draft window, batch size, prompt chunk, with and "
            "without the prefix cache, and after preemption.",
        ),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="With --invariance: a file with an object per line, with `prompt` or `messages`. Default: random ones."
        ),
    ] = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Check the engines, caches and texts of BUNDLE on this machine. Exit code 1 if a check fails."""
    if (compare_with is None) != (text is None):
        raise BadRequest("--compare-with and --text must be given together; got one of them")
    if invariance and text is not None:
        raise BadRequest("--invariance and --compare-with are separate checks; got both; run them one after the other")
    if prompts is not None and not invariance:
        raise BadRequest("--prompts is for --invariance; got it alone; add --invariance or leave it out")
    options.require_fit(Bundle.read(bundle).limits)  # before the imports below, which take seconds
    from tandemrt.runtime.check.compare_bundles import read_text
    from tandemrt.runtime.check.invariance import check_invariance
    from tandemrt.runtime.check.run import check_bundle
    from tandemrt.runtime.cli.doctor import machine

    rows: list[dict[str, Any]] = []
    if invariance:
        chosen = None if prompts is None else read_prompts(prompts, _MAX_PROMPTS)[0]
        results = check_invariance(bundle, options, chosen)
    else:
        content = "" if text is None else read_text(text)
        results = check_bundle(bundle, options, compare_with=compare_with, text=content)
    with Status("opening the bundle" if invariance else "checking the files", console=console) as status:
        for result in results:
            _print(result, same_reference=bool(rows) and rows[-1]["against"] == result.against)
            rows.append(result.to_json())
            status.update(f"checked {escape(result.check)}")
    if invariance:
        compared, parted = (sum(row["numbers"].get(name, 0) for row in rows) for name in ("texts", "parted"))
        console.print(f"{compared} texts compared, {parted or 'none'} parted", highlight=False)
    failed = [row["check"] for row in rows if row["verdict"] == "fail"]
    console.print(f"[red]failed: {escape(', '.join(failed))}[/]" if failed else "[green]everything holds[/]")
    if out is not None:
        report = {"bundle": str(bundle), "device": options.device, "machine": machine(), "holds": not failed}
        out.write_text(json.dumps({**report, "findings": rows}, indent=2) + "\n")
    raise typer.Exit(1 if failed else 0)


def _print(result: "CheckResult", *, same_reference: bool) -> None:
    """Print a result in two lines that are never cut: the verdict and what was compared, then the figures.

    ``same_reference``: as in the result before, so that it need not be repeated.
    """
    against = f", with {result.against}" if result.against and not same_reference else ""
    verdict = f"[{_COLOURS[result.verdict]}]{result.verdict:14}[/]"
    console.print(f"{verdict}  {escape(result.check + against)}", highlight=False, soft_wrap=True)
    console.print(f"{'':16}[dim]{escape(result.result)}[/]", highlight=False, soft_wrap=True)
