"""The soak in short, over a server of its own: the same answers as alone, and metrics that say so."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_mixed_requests_get_over_the_server_what_they_get_alone_and_its_metrics_add_up(tmp_path: Path) -> None:
    figures = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, "-m", "tools.soak", "--requests", "30", "--seed", "1", "--triton", "--json", str(figures)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert found["findings"] == []
    assert found["served"] == 30
