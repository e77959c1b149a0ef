"""Algorithms that trials chose, kept per GPU and library version in ``matmuls`` of the user's cache folder.

Trials take seconds per bundle, and their results depend on nothing else.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from tandemrt.engines.user_cache import cache_folder, is_private, make_private, write_cache
from tandemrt.plugins.kernels.cublaslt import Algorithm, library_version
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.tensors.devices.lookup import device_of

_VERSION = 5  # of the trials and of our kernels; a change of either makes older choices invalid


class Choices:
    """The choices in a file of JSON, in which each key has an algorithm's bytes; none: our own kernel."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._chosen = _load(file)

    @classmethod
    def of(cls, context: Context) -> "Choices":
        """Return those for the context's device, loaded once per context."""
        return context.get_or_create("matmul choices", lambda: cls(cache_folder() / "matmuls" / _name(context.device)))

    def get_or_try(
        self, key: str, supports: Callable[[Algorithm], bool], choose: Callable[[], Algorithm | None]
    ) -> Algorithm | None:
        """Return the choice for ``key``, from ``choose`` if it is missing or not supported."""
        stored = self._chosen.get(key)
        if stored is not None:
            algorithm = Algorithm.from_buffer_copy(stored) if stored else None
            if algorithm is None or supports(algorithm):
                return algorithm
        chosen = choose()
        # other processes may have written since: a lost choice only costs time
        self._chosen = _load(self._file) | self._chosen | {key: bytes(chosen) if chosen is not None else b""}
        make_private(self._file.parent)
        data = json.dumps({name: value.hex() for name, value in self._chosen.items()})
        write_cache(self._file, data.encode())
        return chosen


def _name(device: torch.device) -> str:
    gpu = device_of(device)
    parts = (_VERSION, gpu.name, gpu.capability, torch.version.cuda, library_version())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _load(file: Path) -> dict[str, bytes]:
    """Return the choices in ``file``, without damaged ones; none if it is missing or other users may write it."""
    try:
        if not (is_private(file.parent) and is_private(file)):
            return {}
        choices = {str(key): bytes.fromhex(value) for key, value in json.loads(file.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {key: value for key, value in choices.items() if len(value) in (0, len(bytes(Algorithm())))}
