"""What a backend can do on this machine, for ``tandemrt doctor``. Its opener in the runtime finds it out."""

import importlib.metadata
from dataclasses import dataclass

NO_GPU = "needs a CUDA GPU and a torch built for CUDA"


@dataclass(frozen=True)
class BackendStatus:
    """One backend on this machine. ``builds`` and ``runs`` begin with "yes", or name what is missing."""

    backend: str
    version: str
    builds: str
    runs: str

    def notes(self) -> list[str]:
        """Return a line for what is missing or worth knowing, one if it is the same for building and running."""
        answers = {", to build": self.builds, ", to run": self.runs}
        if self.builds == self.runs:
            answers = {"": self.runs}
        notes = {use: text.removeprefix("needs: ") for use, text in answers.items() if text != "yes"}
        return [f"{self.backend}{use}: {text}" for use, text in notes.items()]


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
