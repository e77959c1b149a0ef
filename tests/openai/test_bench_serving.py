"""The load generator against a running server."""

import json
from pathlib import Path

from typer.testing import CliRunner

from tests.openai.client import EXAMPLES, Served
from tools.bench.serving.__main__ import app


def test_a_load_is_measured(served: Served, tmp_path: Path) -> None:
    asked = [{"messages": example.prompt_messages()} for example in EXAMPLES[:4]] + [{"prompt": "Order of "}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, asked)))
    options = ["--prompts", tmp_path / "prompts.jsonl", "--requests", 5, "--max-tokens", 24, "--ignore-eos"]
    options += ["--clients", 2, "--rates", 1000, "--json", tmp_path / "out.json"]
    done = CliRunner().invoke(app, ["load", served.url, *map(str, options)])
    assert done.exit_code == 0, done.output
    tables = {table["title"]: table["rows"] for table in json.loads((tmp_path / "out.json").read_text())}
    closed, opened = tables["2 clients"], tables["1000 requests/s"]
    for row in (*closed, *opened):
        assert (row["requests"], row["errors"]) == (5, 0)
        assert 1 < row["tokens per round"] <= 5
        assert 0 < row["first token p50"] <= row["p90"] <= row["p99"]
        assert 0 < row["gap p50"] <= row["gap p90"] <= row["gap p99"]
        assert row["tokens/s"] > 0


def test_errors_are_counted_and_shown(served: Served) -> None:
    done = CliRunner().invoke(app, ["load", served.url, "--requests", "2", "--clients", "1", "--extra", '{"top_p": 7}'])
    assert done.exit_code == 0
    assert "top_p" in done.output


def test_a_server_that_does_not_answer_is_named() -> None:
    done = CliRunner().invoke(app, ["load", "http://127.0.0.1:9/v1"])
    assert done.exit_code == 1
    assert "must answer GET http://127.0.0.1:9/v1/models" in done.output


def test_a_command_that_ends_is_named() -> None:
    done = CliRunner().invoke(app, ["load", "http://127.0.0.1:9/v1", "--start", "false"])
    assert done.exit_code == 1
    assert "its command ended with exit status 1" in done.output
