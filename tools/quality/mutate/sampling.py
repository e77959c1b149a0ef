"""Draw mutants from whole modules, by operators and a seed."""

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from tools.quality.mutate.mutants import Mutant
from tools.quality.mutate.operators import Edit, edits, is_bug
from tools.quality.mutate.recording import Recording

FOLDERS = ("engines", "export", "plugins", "runtime")
_START_S = 120.0  # an interpreter with all imports, on a busy machine
_SLOWER = 5.0  # than recorded, before a test counts as hanging


def drawn(tree: Path, folders: Sequence[str], seed: int) -> Iterator[tuple[str, Edit]]:
    """Yield the bugs that operators can plant in the modules of ``folders``, in the order of ``seed``.

    Every line is equally likely and has at most one bug; so are the operators that apply to a line.
    """
    lines: dict[tuple[str, int], list[Edit]] = {}
    for folder in folders:
        for path in sorted((tree / folder).rglob("*.py")):
            file = str(path.relative_to(tree))
            if "built" not in path.parts:
                for edit in edits(path.read_text()):
                    lines.setdefault((file, edit.line), []).append(edit)
    dice = random.Random(seed)
    places = sorted(lines)
    dice.shuffle(places)
    for place in places:
        operator = dice.choice(sorted({edit.operator for edit in lines[place]}))
        edit = dice.choice([edit for edit in lines[place] if edit.operator == operator])
        if is_bug((tree / place[0]).read_text(), edit):
            yield place[0], edit


def sample(
    tree: Path, folders: Sequence[str], count: int, seed: int, recording: Recording, seconds: float
) -> list[Mutant]:
    """Return ``count`` mutants, or all if there are fewer, with tests that run them and take at most ``seconds``."""
    return [_mutant(file, edit, recording, seconds) for file, edit in islice(drawn(tree, folders, seed), count)]


def _mutant(file: str, edit: Edit, recording: Recording, seconds: float) -> Mutant:
    tests, total = recording.chosen(recording.tests_of(file, edit), seconds)
    return Mutant(
        name=f"{file}:{edit.line}:{edit.operator}",
        file=file,
        text=edit.text,
        becomes=edit.becomes,
        tests=tuple(tests),
        start=edit.start,
        limit_s=_START_S + _SLOWER * total,
    )
