"""The doctor says what to install for what somebody wants, and nothing else."""

import pytest

from tandemrt.engines.errors import BadRequest
from tandemrt.runtime.cli import doctor


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The packages that the machine has."""
    packages: dict[str, str] = {}
    monkeypatch.setattr(doctor, "_version", packages.get)
    return packages


def test_of_an_extra_only_what_is_absent_is_named(installed: dict[str, str]) -> None:
    installed |= {"fastapi": "1", "uvicorn": "1"}
    assert doctor.missing("serve") == ["serve needs prometheus-client: pip install 'tandemrt[serve]'"]
    installed["prometheus-client"] = "1"
    assert doctor.missing("serve") == []


def test_of_a_backend_its_own_extra_is_named(installed: dict[str, str]) -> None:
    assert doctor.missing("onnxruntime-cpu") == ["onnxruntime-cpu needs: pip install 'tandemrt[cpu]'"]
    installed["onnxruntime"] = "1"
    assert doctor.missing("onnxruntime-cpu") == []


def test_what_is_nothing_of_ours_is_refused_with_what_there_is() -> None:
    with pytest.raises(
        BadRequest, match=r"WHAT: must be one of onnxruntime-cpu, .*, triton, or the folder of a bundle"
    ):
        doctor.missing("gpu")
