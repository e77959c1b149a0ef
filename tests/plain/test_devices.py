"""A device is one object: other code asks it, and does not ask what kind it is."""

import re
from pathlib import Path

import pytest
import torch

from tandemrt.plugins.tensors.devices.cuda import CudaDevice
from tandemrt.plugins.tensors.devices.device import Device
from tandemrt.plugins.tensors.devices.lookup import device_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("engines", "plugins", "export", "runtime")
ASKS = re.compile(r"torch\.cuda|\.type [!=]= \"(cuda|cpu)\"")
KNOWS = "plugins/tensors/devices/"


def test_only_the_folder_of_devices_knows_cuda() -> None:
    asking = [
        file.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if ASKS.search(file.read_text())
    ]
    assert [file for file in asking if not file.startswith(KNOWS)] == []


def test_a_gpu_has_everything_of_its_own_that_the_host_has() -> None:
    """A method that a GPU inherits would do what a CPU does."""
    assert {name for name in vars(Device) if not name.startswith("_")} - set(vars(CudaDevice)) == set()


def test_the_host_needs_no_streams_and_measures_its_memory() -> None:
    host = device_of(torch.device("cpu"))
    assert host.on_host
    assert (host.new_stream(), host.new_event(), host.record(None), host.current_stream()) == (None, None, None, 0)
    assert 0 < host.free_memory() < host.total_memory()
    start = host.timestamp()
    assert host.has_passed(start)
    assert 0 <= host.seconds_between(start, host.timestamp()) < 60


def test_memory_that_caches_of_files_use_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "MemTotal:       900 kB\nMemFree:        100 kB\nMemAvailable:   600 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda _: lines)
    assert device_of(torch.device("cpu")).free_memory() == 600 * 1024


def test_a_device_is_found_once() -> None:
    assert device_of(torch.device("cuda", 1)) is device_of(torch.device("cuda", 1))
    assert device_of(torch.device("cuda", 1)).numbered() == torch.device("cuda", 1)
    assert device_of(torch.device("cuda", 1)).numbered(2) == torch.device("cuda", 3)
