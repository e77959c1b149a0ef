"""A server's trace: what its clients asked for, and nothing that it asked itself."""

import json
import sys
from pathlib import Path

import pytest

from tandemrt import SamplingParams
from tandemrt.cli import main
from tandemrt.engines.options import RuntimeOptions
from tandemrt.runtime.serve.server import opened


def test_the_requests_of_a_warm_up_are_nobodys(demo_bundle: Path, tmp_path: Path) -> None:
    trace = tmp_path / "out.json"
    with opened({"demo": demo_bundle}, RuntimeOptions(threads=1), trace) as models:
        models.llms["demo"].generate("a", SamplingParams(max_tokens=4))
    events = json.loads(trace.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["rounds", "request 0"]


def test_a_trace_follows_one_bundle(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundles = [str(demo_bundle), f"again={demo_bundle}"]
    monkeypatch.setattr(sys, "argv", ["tandemrt", "serve", *bundles, "--trace", "out.html"])
    with pytest.raises(SystemExit):
        main()
    assert "--trace: follows one bundle, received it with 2; serve each by itself" in capsys.readouterr().err
