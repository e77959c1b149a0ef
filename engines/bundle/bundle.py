"""A bundle: a folder with compiled engines, their weights, the tokenizer and a manifest."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandemrt.engines.bundle.digest import file_digests, holds_weights
from tandemrt.engines.bundle.manifest import FILE_NAME, EngineEntry, EngineName, Limits, Manifest, ReasoningDelimiters
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.draft_kinds import DraftEntry
from tandemrt.engines.validation.errors import BadBundle, InternalError, quoted

TOKENIZER = "tokenizer"
KERNELS = "kernels"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Its contents do not change after the build."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = False) -> "Bundle":
        """Open a bundle folder and check it against its manifest.

        The check covers the size of every file and the digest of every file except weights; ``verify`` adds the digests
        of weights. Raises BadBundle with one line per violation.
        """
        bundle = cls.read(path)
        try:
            problems = bundle.problems(verify=verify)
        except OSError as error:
            rule = f"every file of bundle {bundle.folder} must be readable; {error.filename}: {error.strerror}"
            raise BadBundle(f"{rule}. Correct its permissions or copy it anew") from error
        if problems:
            lines = "\n".join(problems)
            raise BadBundle(f"bundle {bundle.folder} must match its manifest; build it again or copy it anew:\n{lines}")
        return bundle

    @classmethod
    def read(cls, path: str | Path) -> "Bundle":
        """Read the manifest without checking the files. Raises BadBundle."""
        folder = Path(path)
        with suppress(OSError, RuntimeError, ValueError):  # too long, a cycle of links, a zero byte
            folder = folder.resolve()
            if folder.is_dir():
                return cls(folder, Manifest.read(folder))
            if not folder.exists():
                raise BadBundle(f"bundle: {quoted(str(path))} does not exist. Correct the path, or build it: {_BUILD}")
        raise BadBundle(f"bundle must be a folder with {FILE_NAME}; got {quoted(str(path))}. Build one with: {_BUILD}")

    def problems(self, *, verify: bool = False) -> list[str]:
        """Return one line for each difference between the folder and the manifest."""
        paths = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*")}
        stored = {name: path for name, path in paths.items() if path.is_file() and not path.is_symlink()}
        # File managers and network file systems leave dot files. Nothing in a bundle reads them.
        unlisted = sorted(
            name for name in stored if name not in self.manifest.files and name != FILE_NAME and not _hidden(name)
        )
        lines = [f"{name} must be in the manifest; it was added after the build" for name in unlisted]
        # The target of a link may change at any time and may lie outside of the bundle.
        linked = sorted(name for name, path in paths.items() if path.is_symlink() and not _hidden(name))
        lines += [f"{name} must be a regular file or folder; it is a symbolic link" for name in linked]
        to_hash: list[str] = []
        for name, expected in sorted(self.manifest.files.items()):
            if name in linked:
                continue
            if name not in stored:
                lines.append(f"{name} must exist; it is missing")
            elif (size := stored[name].stat().st_size) != expected.size:
                lines.append(f"{name} must have {expected.size} bytes; it has {size}")
            elif verify or not holds_weights(name):
                to_hash.append(name)
        for name, digest in zip(to_hash, file_digests(stored[name] for name in to_hash), strict=True):
            if digest != self.manifest.files[name].sha256:
                lines.append(f"{name} must have sha256 {self.manifest.files[name].sha256}; it has {digest}")
        return lines

    def device(self, chosen: str | None) -> str:
        """Return the name of the device ``chosen``; None stands for the kind that the bundle was built for."""
        return chosen or self.engine("target").device

    def engine(self, name: EngineName) -> EngineEntry:
        """Return an engine's entry. Raises BadBundle if the bundle does not have the engine."""
        engine = self.manifest.engines.get(name)
        if engine is None:
            has = ", ".join(self.manifest.engines)
            raise BadBundle(
                f"bundle {self.name!r} must hold engine {name!r}; it holds {has}. Build it with a draft model"
            )
        return engine

    def path(self, engine: EngineName) -> Path:
        """Return the file of a one-file engine. Raises InternalError for a decoder in steps."""
        file = self.engine(engine).file
        if file is None:
            raise InternalError(f"engine {engine!r} of bundle {self.name!r} is a decoder in steps, not one file")
        return self.folder / file

    def contract(self, engine: EngineName) -> Contract:
        """Return the contract that an engine must fulfil."""
        return self.engine(engine).contract

    @property
    def tokenizer_dir(self) -> Path:
        """Folder of tokenizer.json and its related files; transformers can open it."""
        return self.folder / TOKENIZER

    @property
    def kernels_dir(self) -> Path:
        """Folder of the kernels in ``manifest.kernels``."""
        return self.folder / KERNELS

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def limits(self) -> Limits:
        return self.manifest.limits

    @property
    def vocab(self) -> int:
        """Width of the logits."""
        return self.manifest.vocab

    @property
    def valid_tokens(self) -> int:
        """One past the tokenizer's largest token id; ids from here up to ``vocab`` are padding."""
        return self.manifest.valid_tokens

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.manifest.stop_ids

    @property
    def reasoning(self) -> ReasoningDelimiters | None:
        return self.manifest.reasoning

    @property
    def draft(self) -> DraftEntry:
        return self.manifest.draft


_BUILD = "tandemrt export build RECIPE"


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
