"""Plant small bugs in a copy of the tree, one at a time, and check that the tests find them.

    python -m tools.quality.mutate record
    python -m tools.quality.mutate sample 60 --seed 1

``sample`` plants bugs that operators make of any line (``operators.py``) and runs the tests that run the line.
``record`` finds these tests once, which takes twice as long as the tests do; ``record tests/plain`` records a part.

Why not a library: mutmut 3 chooses tests per function, draws no sample, and forks the process that has loaded the
tests, although the threads of onnxruntime do not survive a fork. cosmic-ray edits the checkout and runs all tests for
every mutant. mutatest samples, runs all tests too, and is not maintained. coverage does the recording.
"""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from tools.quality.mutate.lab import Lab, Verdict, copied_tree
from tools.quality.mutate.mutants import ROOT, Mutant
from tools.quality.mutate.recording import CACHE, TESTS, NoRecording, Recording
from tools.quality.mutate.recording import record as record_tests
from tools.quality.mutate.report import described, report
from tools.quality.mutate.results import Results
from tools.quality.mutate.sampling import FOLDERS
from tools.quality.mutate.sampling import sample as draw_sample

app = typer.Typer(help=__doc__.splitlines()[0], rich_markup_mode=None, pretty_exceptions_enable=False)
console = Console(highlight=False, soft_wrap=True)


@app.command()
def record(
    tests: Annotated[list[str] | None, typer.Argument(help=f"Folders or files of tests; {' '.join(TESTS)}.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that run tests.")] = 2,
    again: Annotated[bool, typer.Option("--again", help="Also files whose tests have a recording.")] = False,
) -> None:
    """Record which tests run which lines, in .mutate_cache. Tests that fail are left out.

    Files of tests that have a recording and have not changed are skipped, so an interrupted run can go on.
    """
    raise typer.Exit(record_tests(tests or TESTS, jobs, again=again))


@app.command()
def sample(
    count: Annotated[int, typer.Argument(min=1, help="How many bugs.")],
    seed: Annotated[int, typer.Option(help="The same seed draws the same bugs from the same tree.")] = 0,
    folder: Annotated[list[str] | None, typer.Option(help=f"Where to plant; all of {' '.join(FOLDERS)}.")] = None,
    seconds: Annotated[float, typer.Option(help="Recorded duration of the tests that one bug may take.")] = 60.0,
    only: Annotated[list[str] | None, typer.Option(help="Only these; a part of the name is enough.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Copies of the tree in which tests run side by side.")] = 1,
    names: Annotated[bool, typer.Option("--list", help="Name the mutants and run nothing.")] = False,
    bar: Annotated[float, typer.Option(help="The exit code is 1 if a smaller share is found.")] = 0.9,
    results: Annotated[
        Path | None, typer.Option(help="A file of verdicts; the bugs that it says are found are not judged again.")
    ] = None,
) -> None:
    """Plant a sample of the bugs that operators make, and print the share that the tests find, by folder."""
    try:
        recording = Recording(CACHE, ROOT)
    except NoRecording as error:
        console.print(escape(str(error)))
        raise typer.Exit(2) from None
    mutants = _selected(draw_sample(ROOT, folder or FOLDERS, count, seed, recording, seconds), only)
    if names:
        for mutant in mutants:
            console.print(escape(described(mutant)))
        return
    verdicts = _judged(mutants, jobs, Results(results))
    if report(console, mutants, verdicts) < bar:
        raise typer.Exit(1)


def _selected(mutants: Sequence[Mutant], only: Sequence[str] | None) -> list[Mutant]:
    selected = [mutant for mutant in mutants if not only or any(part in mutant.name for part in only)]
    if not selected:
        console.print(escape(f"--only: must be part of a mutant's name, received {only}; --list names them"))
        raise typer.Exit(2)
    return selected


def _judged(mutants: Sequence[Mutant], jobs: int, results: Results) -> dict[str, Verdict]:
    """Judge ``mutants`` in ``jobs`` copies of the tree; print each verdict when it is known, and add it to ``results``.

    Mutants that ``results`` says are found are not judged again.
    """
    verdicts = {mutant.name: verdict for mutant in mutants if (verdict := results.detection(mutant)) is not None}
    waiting = iter([mutant for mutant in mutants if mutant.name not in verdicts])

    def work(_: int) -> None:
        with copied_tree() as tree:
            lab = Lab(tree, Path(sys.executable))
            for mutant in waiting:
                start = time.perf_counter()
                verdict = verdicts[mutant.name] = lab.judge_with_sound_tests(mutant)
                results.add(mutant, verdict)
                console.print(f"{verdict:<26}{escape(mutant.name)}  ({time.perf_counter() - start:.0f} s)")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, range(jobs)))
    return verdicts


if __name__ == "__main__":
    app()
