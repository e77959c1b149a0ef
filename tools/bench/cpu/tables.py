"""Write the tables of docs/data from the figures of a comparison.

python -m tools.bench.cpu.tables FIGURES docs/data
"""

import csv
import io
import json
from pathlib import Path
from typing import Annotated

import typer

from tools.bench.cpu.measures import measures
from tools.bench.cpu.results import Results, table

_FILES = {False: ("cpu-peers-float32.csv", "float32"), True: ("cpu-peers-quantized.csv", "quantized weights")}


def main(
    figures: Annotated[Path, typer.Argument(help="The file that --json of tools.bench.cpu wrote.")],
    folder: Annotated[Path, typer.Argument(help="The folder of the tables.")],
) -> None:
    """Write a CSV file for float32 and one for weights below it, or one for a GGUF file."""
    data = json.loads(figures.read_text())
    results = Results.from_json(data)
    gguf = next((entrant.form for entrant in results.figures if entrant.form.endswith(".gguf")), None)
    files = _FILES if gguf is None else {True: (f"cpu-peers-{gguf}.csv", gguf)}
    for quantized, (name, weights) in files.items():
        head, *rows = table(results, measures(1024), quantized=quantized, mark=str)
        text = io.StringIO()
        text.write(f"# A CPU against other engines, {weights}\n# {data['command']}\n")
        text.write(f"# {data['machine']}; {', '.join(data['versions'].values())}\n")
        csv.writer(text, lineterminator="\n").writerows([["measure", *head[1:]], *rows])
        (folder / name).write_text(text.getvalue())
        print(folder / name)


if __name__ == "__main__":
    typer.run(main)
