"""Opens the engines of a bundle, each on the backend that its manifest names."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.parallel.threads import map_in_threads
from tandemrt.engines.recipe.backend_status import BackendStatus
from tandemrt.engines.recipe.backends import BACKENDS
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.device.backends.base import Engine

_CONCURRENT_SESSIONS = 4  # sessions that open concurrently; each uses one thread to read and optimize its graph


@dataclass(frozen=True)
class Opening:
    """What every engine of a bundle is opened with."""

    bundle: Bundle
    device: torch.device
    threads: int | None
    cuda_graphs: bool


class Opener(Protocol):
    """The functions of opener.py in the folder of a backend."""

    def engine_opener(self, opening: Opening) -> Callable[[EngineName], Engine]:
        """Return the function that opens an engine by its name. Engines that it opens may share memory.

        Several threads may call the function. It raises BackendUnavailable if the engine cannot run here, BadBundle if
        its file does not fit.
        """

    def require_memory(self, bundle: Bundle, device: torch.device) -> None:
        """Raise BackendUnavailable if the device has too little memory for the engines, before any is open."""

    def backend_status(self, name: str) -> BackendStatus:
        """Return what the backend ``name`` can do on this machine. Its engine library may be missing."""


def engines_in_use(bundle: Bundle) -> list[EngineName]:
    """Return the engines that rounds use. Drafts without a model have no probabilities to verify."""
    unused = ("vision",) if bundle.draft.engines else ("vision", "verify_probs")
    return [name for name in bundle.manifest.engines if name not in unused]


def require_known_backends(bundle: Bundle) -> None:
    """Raise BackendUnavailable for an engine of a backend that this version does not have."""
    for name, entry in bundle.manifest.engines.items():
        if entry.backend not in BACKENDS:
            raise BackendUnavailable(
                f"engine {name!r}: built for {entry.backend} ({entry.built_for}), which this version can build but not "
                f"run; it runs {', '.join(BACKENDS)}: build the bundle with one of those in the recipe's [backend] name"
            )


def open_engines(
    bundle: Bundle,
    device: torch.device,
    threads: int | None,
    names: Sequence[EngineName] | None = None,
    *,
    cuda_graphs: bool = True,
) -> dict[str, Engine]:
    """Open the engines ``names`` of ``bundle``, or all, on ``device``.

    ``cuda_graphs``: whether a target over several ranks may use CUDA graphs; other engines leave that to their caller.
    Raises BackendUnavailable for engines that cannot run here, BadBundle for a name that the bundle does not have.
    """
    require_known_backends(bundle)
    for folder in sorted({BACKENDS[entry.backend].folder for entry in bundle.manifest.engines.values()}):
        _opener(folder).require_memory(bundle, device)
    names = list(bundle.manifest.engines) if names is None else names
    folders = {name: BACKENDS[bundle.engine(name).backend].folder for name in names}
    opening = Opening(bundle, device, threads, cuda_graphs)
    openers = {folder: _opener(folder).engine_opener(opening) for folder in set(folders.values())}

    def open_one(name: EngineName) -> Engine:
        return openers[folders[name]](name)

    if not device_of(device).on_host:  # one by one, because engines use the current stream of this thread
        return {name: open_one(name) for name in names}
    return dict(zip(names, map_in_threads(open_one, names, _CONCURRENT_SESSIONS), strict=True))


def _opener(folder: str) -> Opener:
    # Imported on demand: a bundle needs only its own backends installed.
    return cast("Opener", importlib.import_module(f"tandemrt.runtime.device.backends.{folder}.opener"))
