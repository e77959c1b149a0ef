"""The output of ``tandemrt export quantize``."""

from rich import box
from rich.markup import escape
from rich.table import Table

from tandemrt.export.bundle.publish import Published
from tandemrt.export.cli.progress import console


def print_published(report: Published) -> None:
    """Print a table of the error per layer and weight, and the size before and after."""
    parts = [module.removeprefix("model.layers.").partition(".") for module in report.errors]
    kinds = list(dict.fromkeys(kind for *_, kind in parts))
    table = Table(title="Weights changed by (root mean square, %)", title_justify="left", box=box.SIMPLE)
    table.add_column("layer", justify="right")
    for kind in kinds:
        table.add_column(kind.rpartition(".")[2], justify="right")
    for layer in sorted({layer for layer, *_ in parts}, key=int):
        errors = [report.errors.get(f"model.layers.{layer}.{kind}") for kind in kinds]
        table.add_row(layer, *("" if error is None else f"{error:.2%}".rstrip("%") for error in errors))
    console.print(table)
    size = f"{report.before / 1e6:,.1f} MB to {report.after / 1e6:,.1f} MB"
    console.print(f"Checkpoint of {size}: {escape(str(report.folder))}")
