"""Verdicts of a sample in a file, so that a run that was interrupted can be continued."""

import json
from collections.abc import Mapping
from pathlib import Path
from threading import Lock

from tools.quality.mutate.lab import Verdict
from tools.quality.mutate.mutants import Mutant


class Results:
    """The verdicts of ``file``; without a file, they are forgotten. Several threads may add verdicts.

    A bug that was not found is judged again: it may have a test since.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = Lock()
        known: Mapping[str, str] = json.loads(file.read_text()) if file is not None and file.is_file() else {}
        self._verdicts = {bug: Verdict(verdict) for bug, verdict in known.items()}

    def detection(self, mutant: Mutant) -> Verdict | None:
        """Return the verdict of an earlier run, or None unless it found the bug."""
        verdict = self._verdicts.get(_bug(mutant))
        return verdict if verdict is not None and verdict.is_seen else None

    def add(self, mutant: Mutant, verdict: Verdict) -> None:
        with self._lock:
            self._verdicts[_bug(mutant)] = verdict
            if self._file is not None:
                self._file.write_text(json.dumps(self._verdicts, indent=1))


def _bug(mutant: Mutant) -> str:
    """What identifies a bug while its line stays where it is."""
    return f"{mutant.name}: {mutant.text} -> {mutant.becomes}"
