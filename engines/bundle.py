"""A bundle: a folder that holds compiled engines, the weights they point into, the tokenizer, and a manifest."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandemrt.engines.contract import Contract
from tandemrt.engines.digest import file_digests, holds_weights
from tandemrt.engines.errors import BadBundle, InternalError, quoted
from tandemrt.engines.manifest import FILE_NAME, Draft, Engine, EngineName, Limits, Manifest, Markers

TOKENIZER = "tokenizer"
KERNELS = "kernels"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Everything in it was fixed when it was built."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = False) -> "Bundle":
        """Open a bundle folder and check it against its manifest.

        Sizes of all files and digests of all but the weights are always checked, digests of the weights with
        ``verify``. Raises BadBundle, with every violation on its own line.
        """
        bundle = cls.read(path)
        try:
            problems = bundle.problems(verify=verify)
        except OSError as error:
            rule = f"every file of bundle {bundle.folder} must be readable; {error.filename}: {error.strerror}"
            raise BadBundle(f"{rule}. Correct its permissions or copy it anew") from error
        if problems:
            lines = "\n".join(problems)
            raise BadBundle(f"bundle {bundle.folder} is not as it was built; build it again or copy it anew:\n{lines}")
        return bundle

    @classmethod
    def read(cls, path: str | Path) -> "Bundle":
        """Read the manifest alone, without looking at the files. Raises BadBundle."""
        folder = Path(path)
        with suppress(OSError, RuntimeError, ValueError):  # too long, links that lead in a circle, a zero byte
            folder = folder.resolve()
            if folder.is_dir():
                return cls(folder, Manifest.read(folder))
        raise BadBundle(f"bundle must be a folder with {FILE_NAME}; got {quoted(str(path))}. Build one with: {_BUILD}")

    def problems(self, *, verify: bool = False) -> list[str]:
        """Say, one line each, how the folder departs from the manifest. Empty means that everything holds."""
        paths = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*")}
        found = {name: path for name, path in paths.items() if path.is_file() and not path.is_symlink()}
        # Dot files are left by file managers and network file systems; nothing in a bundle reads them.
        strangers = sorted(
            name for name in found if name not in self.manifest.files and name != FILE_NAME and not _hidden(name)
        )
        lines = [f"{name} must be in the manifest; it was added after the build" for name in strangers]
        # Where a link leads may change at any time, and may be none of the bundle's business.
        linked = sorted(name for name, path in paths.items() if path.is_symlink() and not _hidden(name))
        lines += [f"{name} must be the bundle's own; it is a symbolic link" for name in linked]
        whole: list[str] = []
        for name, expected in sorted(self.manifest.files.items()):
            if name in linked:
                continue
            if name not in found:
                lines.append(f"{name} must exist; it is missing")
            elif (size := found[name].stat().st_size) != expected.size:
                lines.append(f"{name} must have {expected.size} bytes; it has {size}")
            elif verify or not holds_weights(name):
                whole.append(name)
        for name, digest in zip(whole, file_digests(found[name] for name in whole), strict=True):
            if digest != self.manifest.files[name].sha256:
                lines.append(f"{name} must have sha256 {self.manifest.files[name].sha256}; it has {digest}")
        return lines

    def engine(self, name: EngineName) -> Engine:
        """Return an engine's entry. Raises BadBundle when the bundle was built without it."""
        engine = self.manifest.engines.get(name)
        if engine is None:
            has = ", ".join(self.manifest.engines)
            raise BadBundle(
                f"bundle {self.name!r} must hold engine {name!r}; it holds {has}. Build it with a draft model"
            )
        return engine

    def path(self, engine: EngineName) -> Path:
        """Return the file of an engine that is one. Raises InternalError for one in steps."""
        file = self.engine(engine).file
        if file is None:
            raise InternalError(f"engine {engine!r} of bundle {self.name!r} is a decoder in steps, not one file")
        return self.folder / file

    def contract(self, engine: EngineName) -> Contract:
        """Return the bindings an engine must have."""
        return self.engine(engine).contract

    @property
    def tokenizer_dir(self) -> Path:
        """The folder of tokenizer.json and what belongs to it; transformers opens it as well."""
        return self.folder / TOKENIZER

    @property
    def kernels_dir(self) -> Path:
        """A folder with the kernels named in ``manifest.kernels``."""
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
        """Token ids from here up to ``vocab`` are padding that spells nothing."""
        return self.manifest.valid_tokens

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.manifest.stop_ids

    @property
    def markers(self) -> Markers | None:
        return self.manifest.markers

    @property
    def draft(self) -> Draft:
        return self.manifest.draft


_BUILD = "tandemrt export build RECIPE"


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
