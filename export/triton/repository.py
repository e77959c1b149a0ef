"""Write a bundle into a model repository of Triton Inference Server."""

import os
import shutil
from collections.abc import Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Unpack

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.deployment import Deployment
from tandemrt.engines.options.options import ServedOptions
from tandemrt.engines.validation.errors import BadRepository, BadRequest, quoted
from tandemrt.export.staging import staged
from tandemrt.export.triton import config

VERSION = "1"
BUNDLE = "bundle"
MODEL_FILE = (
    '"""Served by TandemRT: see config.pbtxt."""\n\n'
    "from tandemrt.runtime.servers.triton.model import TritonPythonModel\n"
)


def write_model(
    bundle: Bundle,
    repository: Path,
    *,
    name: str | None = None,
    copy: bool = False,
    instances: int = 1,
    device: str | None = None,
    **options: Unpack[ServedOptions],
) -> Path:
    """Write ``repository/name`` (configuration, ``1/model.py``, ``1/bundle``) atomically, and return it.

    The bundle is linked, by a path relative to the model, or copied. ``device``: "cpu", "cuda" (every GPU that the
    server sees) or "cuda:0,1"; None: the device that the bundle was built for. ``instances`` run on the CPU, or on
    each GPU. An instance over ranks has that GPU and the next ones, and "cuda" is the first. ``options``: the
    RuntimeOptions with which each instance opens the bundle. The function replaces an earlier model that it wrote
    itself; it raises BadRepository for any other existing folder.
    """
    try:
        deployment = Deployment(bundle=BUNDLE, tandemrt_version=metadata.version("tandemrt"), **options)
        deployment.require_fit(bundle.limits)
    except BadRequest as error:
        raise BadRepository(str(error)) from error
    if instances < 1:
        raise BadRepository(f"instances: at least one must run, received {quoted(instances)}")
    name = bundle.name if name is None else name
    folder = repository / name
    if not name or Path(name).name != name or name.startswith("."):
        raise BadRepository(f"name: must be a plain folder name, received {quoted(name)}")
    _check_free(folder)
    if not copy and bundle.folder.is_relative_to(folder.resolve()):
        raise BadRepository(
            f"bundle: {bundle.folder} would be replaced with the model that links to it; use --copy, or name the "
            "bundle that it was copied from"
        )
    gpus = _gpus(device or bundle.engine("target").device)
    if gpus is not None and bundle.manifest.ranks:
        gpus = _first_gpus(gpus, 1 + len(bundle.manifest.ranks))
    message = config.model_config(name, parameters=deployment.parameters(), instances=instances, gpus=gpus)
    repository.mkdir(parents=True, exist_ok=True)
    with staged(folder) as building:
        config.write_config(message, building / config.FILE_NAME)
        version = building / VERSION
        version.mkdir()
        (version / "model.py").write_text(MODEL_FILE)
        if copy:
            shutil.copytree(bundle.folder, version / BUNDLE)
        else:
            link = os.path.relpath(bundle.folder, folder.resolve() / VERSION)
            (version / BUNDLE).symlink_to(link, target_is_directory=True)
    return folder


def _check_free(folder: Path) -> None:
    written = folder / VERSION / "model.py"
    if folder.exists() and not (written.is_file() and written.read_bytes() == MODEL_FILE.encode()):
        raise BadRepository(f"{folder}: must be free or a model that this command wrote; choose another --name")


def _gpus(device: str) -> Sequence[int] | None:
    kind, _, numbers = device.partition(":")
    try:
        gpus = [int(number) for number in numbers.split(",")] if numbers else []
    except ValueError:
        kind = ""
    if kind not in ("cpu", "cuda") or (kind == "cpu" and numbers) or any(gpu < 0 for gpu in gpus):
        raise BadRepository(f"device: must be cpu, cuda or cuda:0,1,..., received {quoted(device)}")
    return None if kind == "cpu" else gpus


def _first_gpus(gpus: Sequence[int], ranks: int) -> Sequence[int]:
    """Return the GPU of rank 0 of each group of instances. Raises BadRepository if two groups would share a GPU."""
    first = sorted(gpus or [0])
    for before, after in pairwise(first):
        if after - before < ranks:
            raise BadRepository(
                f"device: an instance over {ranks} ranks has {ranks} GPUs from the named one on, so named GPUs must be "
                f"{ranks} apart, received {quoted(after)} after {quoted(before)}"
            )
    return first
