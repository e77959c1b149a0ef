"""``tandemrt models``: list and remove the models in the user's cache folder."""

import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from tandemrt.engines.bundle.lock import builder_lock, locked
from tandemrt.engines.user_cache import BUNDLES, CHECKPOINTS, cache_folder
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.engines.validation.records import nearest

models = typer.Typer(help="List and remove the models in your cache folder.", no_args_is_help=True)


@dataclass(frozen=True)
class CachedModel:
    """A bundle that was built on demand, or an unpacked GGUF file. It can be built again at any time."""

    folder: Path
    size: int  # bytes
    built: datetime

    @classmethod
    def read(cls, folder: Path) -> "CachedModel":
        size = sum(file.lstat().st_size for file in folder.rglob("*"))
        return cls(folder, size, datetime.fromtimestamp(folder.stat().st_mtime))

    def remove(self) -> None:
        """Remove the folder and its recipe. Raises BadRequest if a process builds or uses it."""
        name = self.folder.name
        with locked(builder_lock(self.folder)) as not_built, locked(self.folder) as unused:
            if not_built is False or unused is False:
                raise BadRequest(f"NAME: must not be in use, received {quoted(name)}; end the process that has it open")
            if unused is None:
                raise BadRequest(
                    f"NAME: the file system of {self.folder} has no locks, so a process may use it; remove it by hand"
                )
            # A model disappears at once. The next build of this name removes what an interrupt leaves of it.
            self.folder.rename(removed := self.folder.with_name(f".{name}.building-removed"))
            self.folder.with_name(f"{name}.toml").unlink(missing_ok=True)
            shutil.rmtree(removed)


def cached_models() -> list[CachedModel]:
    """Return the models in the cache folder, the latest first. A link, which leads out of the cache, is none."""
    folders = [folder for kind in (BUNDLES, CHECKPOINTS) for folder in (cache_folder() / kind).glob("[!.]*")]
    models = [CachedModel.read(folder) for folder in folders if folder.is_dir() and not folder.is_symlink()]
    return sorted(models, key=lambda model: model.built, reverse=True)


@models.command("list")
def list_models() -> None:
    """List the models in your cache folder, the latest first."""
    rows = [
        (model.folder.name, f"{model.size / 1e6:,.1f} MB", f"{model.built:%Y-%m-%d %H:%M}", model.folder.parent.name)
        for model in cached_models()
    ]
    if not rows:
        print(f"no model is in {cache_folder()}; bundles that `tandemrt export build` wrote elsewhere are not listed")
        return
    width = max((len(name) for name, *_ in rows), default=0)
    for name, size, built, kind in [("NAME", "SIZE", "BUILT", "KIND"), *rows]:
        print(f"{name:<{width}}  {size:>12}  {built:<16}  {kind}")


@models.command()
def rm(
    name: Annotated[str, typer.Argument(help="A name that `models list` prints, or its beginning.", metavar="NAME")],
) -> None:
    """Remove a model from your cache folder. A model that a process uses stays."""
    named = {model.folder.name: model for model in cached_models()}
    matches = [name] if name in named else [full for full in named if name and full.startswith(name)]
    if len(matches) != 1:
        why = f"fits {', '.join(matches)}" if matches else f"names none{nearest(name, list(named))}"
        raise BadRequest(f"NAME: must be one model that `tandemrt models list` prints; {quoted(name)} {why}")
    model = named[matches[0]]
    model.remove()
    print(f"removed {matches[0]}, {model.size / 1e6:,.1f} MB")
