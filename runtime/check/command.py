"""``tandemrt export check``: every check of a bundle as a row of a table, and as JSON."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.command_options import takes_options
from tandemrt.engines.errors import BadRequest
from tandemrt.engines.options import RuntimeOptions
from tandemrt.runtime.cli.arguments import BundlePath, Report

_COLOURS = {"pass": "green", "fail": "red", "measured": "cyan", "not applicable": "dim"}
console = Console()


def register(export: typer.Typer) -> None:
    """Add the command to ``tandemrt export``."""
    export.command()(check)


# These change nothing that is checked.
@takes_options(
    leave_out=(
        *("queue_limit", "profile"),
        *("grammar_timeout_s", "fill_timeout_s", "max_grammar_bytes", "max_prompt_bytes", "prompt_timeout_s"),
    )
)
def check(
    bundle: BundlePath,
    out: Report = None,
    beside: Annotated[
        Path | None, typer.Option(help="Another bundle, of the checkpoint that this one's weights were rounded from.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="With --beside: a file with text that both read; logits, perplexity, drafts.")
    ] = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Check BUNDLE on the machine that will serve it: engines, caches, texts. Exit code 1 if anything fails."""
    if (beside is None) != (text is None):
        raise BadRequest("--beside and --text must be given together; got one of them")
    options.require_fit(Bundle.read(bundle).limits)  # refused before the runtime's imports, which take seconds
    from tandemrt.runtime.check.beside import read_text
    from tandemrt.runtime.check.run import check_bundle
    from tandemrt.runtime.cli.doctor import machine

    table = Table("check", "compared with", "result", "verdict", show_edge=False)
    rows: list[dict[str, Any]] = []
    words = "" if text is None else read_text(text)
    with Status("checking the files", console=console) as status:
        for finding in check_bundle(bundle, options, beside=beside, text=words):
            rows.append(finding.to_json())
            colour = _COLOURS[finding.verdict]
            cells = (escape(text) for text in (finding.check, finding.against, finding.result))
            table.add_row(*cells, f"[{colour}]{finding.verdict}[/]")
            status.update(f"checked {escape(finding.check)}")
    console.print(table)
    failed = [row["check"] for row in rows if row["verdict"] == "fail"]
    console.print(f"[red]failed: {escape(', '.join(failed))}[/]" if failed else "[green]everything holds[/]")
    if out is not None:
        report = {"bundle": str(bundle), "device": options.device, "machine": machine(), "holds": not failed}
        out.write_text(json.dumps({**report, "findings": rows}, indent=2) + "\n")
    raise typer.Exit(1 if failed else 0)
