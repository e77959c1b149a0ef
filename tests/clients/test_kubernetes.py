"""The manifest of docs/kubernetes.yaml is valid by the schemas of Kubernetes."""

import json
import os
import subprocess
from pathlib import Path

from tests.conftest import ROOT
from tests.waiting import PATIENCE_S

MANIFEST = ROOT / "docs" / "kubernetes.yaml"


def errors_in(manifest: Path) -> list[str]:
    script = str(Path(__file__).with_name("validate_kubernetes.py"))
    command = [os.environ["CLIENTS_PYTHON"], script, str(manifest), "1.34"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return [str(error) for error in json.loads(done.stdout)]


def test_the_manifest_is_valid() -> None:
    assert errors_in(MANIFEST) == []


def test_the_validator_sees_a_field_that_kubernetes_does_not_know(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(MANIFEST.read_text().replace("periodSeconds: 10", "periodSecond: 10"))
    [error] = errors_in(wrong)
    assert "periodSecond" in error
