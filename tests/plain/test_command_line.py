"""The command line without a bundle: help, version, and files with prompts."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tandemrt import __version__
from tandemrt.cli import app
from tandemrt.engines.options.command_options import (
    ADVANCED,
    BUILDING,
    LIMITS,
    MEMORY,
    ORDER,
    PANELS,
    SERVER,
    SPECULATION,
)
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.cli.arguments import read_prompts


def panels(command: str) -> dict[str, list[str]]:
    """Return the options of a command by panel of its help."""
    found: Any = typer.main.get_command(app)
    by_panel: dict[str, list[str]] = {}
    for parameter in found.commands[command].params:
        by_panel.setdefault(getattr(parameter, "rich_help_panel", None) or "", []).append(parameter.name)
    return by_panel


@pytest.mark.parametrize("command", ["run", "chat", "bench", "serve"])
def test_the_options_of_a_command_are_grouped(command: str) -> None:
    found = panels(command)
    assert found[BUILDING] == ["max_model_len", "dtype", "draft"]
    assert found[SPECULATION] == ["num_draft_tokens", "adaptive_draft_tokens", "draft_masks"]
    assert found[MEMORY] == ["cache_tokens", "prefix_caching"]
    assert "prompt_timeout_s" in found[LIMITS]
    assert "cuda_graphs" in found[ADVANCED]


def test_the_options_of_a_server_are_grouped() -> None:
    found = panels("serve")
    assert {"metrics_without_key", "grace", "log_level"} <= set(found[SERVER])
    assert {"max_body", "max_connections", "queue_limit"} <= set(found[LIMITS])


@pytest.mark.parametrize("command", ["run", "chat", "serve", "bench", "calibrate", "check"])
def test_the_help_has_common_options_first_and_fits_into_80_columns(command: str, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(app, [command, "--help"]).output.splitlines()
    assert max(map(len, lines)) <= 80
    sections = [line.rstrip(":") for line in lines if line[:1].isalpha() and line.endswith(":")]
    assert sections == [panel for panel in ("Arguments", *ORDER) if panel in sections]
    assert {"Arguments", "Options"} <= set(sections)
    options: Any = typer.main.get_command(app)
    names = [name for parameter in options.commands[command].params for name in parameter.opts if name[:2] == "--"]
    assert [name for name in names if not any(line.lstrip().startswith(name) for line in lines)] == []


def test_panels_hold_options_that_exist() -> None:
    assert set(PANELS) <= set(RuntimeOptions.model_fields)


@pytest.mark.parametrize("command", [[], ["run"], ["export"], ["export", "build"]])
def test_h_prints_the_help(command: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert "Usage:" in short.output
    assert short.output == long.output


def test_a_group_of_commands_without_a_command_prints_its_help() -> None:
    alone, asked = (CliRunner().invoke(app, ["export", *option]).output for option in ([], ["--help"]))
    assert alone.strip() == asked.strip() != ""


def test_a_shell_can_complete_commands_and_options() -> None:
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).output
    for words, expected in (("tandemrt mod", ["models"]), ("tandemrt serve --conf", ["--config"])):
        asked = {"_TANDEMRT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        assert CliRunner().invoke(app, env=asked, prog_name="tandemrt").output.split() == expected


def test_version_prints_the_version() -> None:
    found = CliRunner().invoke(app, ["--version"])
    assert (found.exit_code, found.output) == (0, f"tandemrt {__version__}\n")


def test_help_loses_nothing_to_markup() -> None:
    found: Any = typer.main.get_command(app)
    commands = [*found.commands.values(), *found.commands["export"].commands.values()]
    texts = [text for command in commands for text in (command.help, *(getattr(p, "help", "") for p in command.params))]
    assert [text for text in texts if text and "[" in text] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--prompts: must be a readable file, received FILE: No such file or directory"),
        ("", "--prompts: must hold at least one line, received FILE, which has none"),
        ('{"prompt": "a"}\n\n{"text": "b"}', 'received \'{"text": "b"}\' in FILE line 3'),
        ("nope", "received 'nope' in FILE line 1: Expecting value"),
        ("[1]", "must hold one JSON object per line with `prompt` or `messages`, received '[1]' in FILE line 1"),
    ],
)
def test_a_file_without_prompts_is_rejected_with_the_reason(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(BadRequest) as caught:
        read_prompts(file, 5)
    assert message.replace("FILE", str(file)) in str(caught.value)


def test_prompts_are_read_up_to_the_count_with_their_schemas(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"messages": [], "schema": true}\nnot read\n')
    assert read_prompts(file, 2) == (["a", []], [None, True])
