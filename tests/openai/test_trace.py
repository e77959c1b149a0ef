"""Trace of a server: requests of clients, without the warm-up."""

import json
import sys
from pathlib import Path

import pytest

from tandemrt import SamplingParams
from tandemrt.cli import main
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.servers.http.server import open_models


def test_a_trace_does_not_contain_the_warm_up(demo_bundle: Path, tmp_path: Path) -> None:
    trace = tmp_path / "out.json"
    with open_models({"demo": demo_bundle}, RuntimeOptions(threads=1), trace) as models:
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
