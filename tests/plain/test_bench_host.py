"""The benchmark of the host's work in a round runs for every kind of request, and measures all of it."""

import sys

import pytest
import typer

from tools.bench import host as bench_host


def test_every_kind_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_host", "--batch", "2", "--vocab", "1000", "--rounds", "3"])
    with pytest.raises(SystemExit) as caught:
        typer.run(bench_host.main)
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert not caught.value.code
    assert [line.split("│")[1].strip() for line in lines] == list(bench_host.KINDS)
    assert all(float(value) > 0 for line in lines for value in line.split("│")[2:-1])
