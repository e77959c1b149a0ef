"""Print which mutants the tests found."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tools.quality.mutate.lab import Verdict
from tools.quality.mutate.mutants import Mutant


def report(console: Console, mutants: Sequence[Mutant], verdicts: Mapping[str, Verdict]) -> float:
    """Print the mutants that were not found and the share by folder; return the share of those that tests run."""
    for verdict in (Verdict.UNSEEN, Verdict.UNCOVERED, Verdict.SLOW):
        for mutant in mutants:
            if verdicts[mutant.name] is verdict:
                console.print(escape(f"{verdict}: {described(mutant)}"))
    counts: dict[str, Counter[str]] = {}
    for mutant in mutants:
        folder = "/".join(PurePosixPath(mutant.file).parts[:-1][:2])
        for row in (folder, "all"):
            verdict = verdicts[mutant.name]
            counts.setdefault(row, Counter())["seen" if verdict.is_seen else str(verdict)] += 1
    rows = Table("folder", "seen", "not seen", "share", "no test runs it", show_edge=False)
    for folder in [*sorted(counts.keys() - {"all"}), "all"]:
        count = counts[folder]
        seen, unseen = count["seen"], count[Verdict.UNSEEN]
        rows.add_row(folder, str(seen), str(unseen), _share(seen, unseen), str(count[Verdict.UNCOVERED]))
    console.print(rows)
    seen, unseen = counts["all"]["seen"], counts["all"][Verdict.UNSEEN]
    return seen / (seen + unseen) if seen + unseen else 0.0


def described(mutant: Mutant) -> str:
    """A sampled mutant in one line."""
    text, becomes = (" ".join(each.split()) for each in (mutant.text, mutant.becomes))
    return f"{mutant.name}: {text!r} -> {becomes!r} ({len(mutant.tests)} tests)"


def _share(seen: int, unseen: int) -> str:
    return f"{seen / (seen + unseen):.2f}" if seen + unseen else "-"
