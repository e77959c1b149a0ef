"""A short soak of a Triton server: every output equals that of the request alone, and the metrics add up."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_served_requests_get_the_same_output_as_alone_and_the_metrics_add_up(tmp_path: Path) -> None:
    figures = tmp_path / "soak.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tools.quality.soak",
            "--requests",
            "30",
            "--seed",
            "1",
            "--triton",
            "--json",
            str(figures),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(figures.read_text())
    assert result["findings"] == []
    assert result["triton_requests"] == 30
