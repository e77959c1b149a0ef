"""instructor in an environment of its own, because it needs older packages than the other tests."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.servers.openai.config import ServerConfig
from tests.openai.conftest import serving
from tests.waiting import PATIENCE_S

SCRIPT = Path(__file__).with_name("ask_instructor.py")
ORDER = {"kind": "order", "customer": "Leo Conti", "currency": "GBP"}


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_instructor_gets_an_object_complete_and_streamed(demo_bundle: Path, mode: str) -> None:
    with serving(demo_bundle, ServerConfig(port=0), RuntimeOptions(threads=1)) as served:
        command = [os.environ["CLIENTS_PYTHON"], str(SCRIPT), served.url, mode]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [ORDER, ORDER]
