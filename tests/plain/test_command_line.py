"""The command line without a bundle: help, version, and files with prompts."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tandemrt import __version__, cli
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
from tandemrt.engines.validation.errors import BadBundle, BadRequest
from tandemrt.runtime.cli.arguments import read_prompts
from tandemrt.runtime.cli.register import MODULES
from tests.command_line import app


def panels(command: str) -> dict[str, list[str]]:
    """Return the options of a command by panel of its help."""
    group: Any = typer.main.get_command(app)
    by_panel: dict[str, list[str]] = {}
    for parameter in group.commands[command].params:
        by_panel.setdefault(getattr(parameter, "rich_help_panel", None) or "", []).append(parameter.name)
    return by_panel


@pytest.mark.parametrize("command", ["run", "chat", "bench", "serve", "batch"])
def test_the_options_of_a_command_are_grouped(command: str) -> None:
    options = panels(command)
    assert options[BUILDING] == ["max_model_len", "dtype", "draft"]
    assert options[SPECULATION] == ["num_draft_tokens", "adaptive_draft_tokens", "lookup", "draft_masks"]
    assert options[MEMORY] == ["cache_tokens", "prefix_caching"]
    assert "prompt_timeout_s" in options[LIMITS]
    assert "cuda_graphs" in options[ADVANCED]


def test_the_options_of_a_server_are_grouped() -> None:
    options = panels("serve")
    assert {"metrics_without_key", "grace", "log_level"} <= set(options[SERVER])
    assert {"max_body", "max_connections", "queue_limit"} <= set(options[LIMITS])


# command and option: the default, the least value and the largest. Those of RuntimeOptions are in test_rules.py.
NUMBERS: dict[tuple[str, str], tuple[float | None, float | None, float | None]] = {
    **{(command, "max_model_len"): (None, 2, None) for command in ("run", "chat", "serve", "batch", "bench", "build")},
    **{(command, "temperature"): (0.0, None, None) for command in ("run", "chat", "bench")},
    **{(command, "max_answer"): (16 << 20, 1, None) for command in ("serve", "batch")},
    ("bench", "length"): (None, 1, None),
    ("bench", "max_tokens"): (128, 1, None),
    ("bench", "repeats"): (3, 1, None),
    ("bench", "requests"): (16, 1, None),
    ("calibrate", "max_tokens"): (100, 2, None),
    ("calibrate", "requests"): (40, 1, None),
    ("quantize", "group"): (128, None, None),
    ("serve", "batch_bytes"): (4 << 30, 1, None),
    ("serve", "body_timeout"): (30.0, 0.1, None),
    ("serve", "grace"): (None, 0, None),
    ("serve", "header_timeout"): (30.0, 0.1, None),
    ("serve", "max_bodies"): (None, 1, None),
    ("serve", "max_body"): (4 << 20, 1, None),
    ("serve", "max_connections"): (None, 1, None),
    ("serve", "max_connections_per_address"): (None, 1, None),
    ("serve", "port"): (8000, 0, 65535),
    ("serve", "write_timeout"): (30.0, 0.1, None),
    ("triton", "instances"): (1, 1, None),
}


def numbers(group: Any) -> dict[tuple[str, str], tuple[Any, Any, Any]]:
    """Return the default and the bounds of every option with a number in the commands of ``group``."""
    result: dict[tuple[str, str], tuple[Any, Any, Any]] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            result |= numbers(command)
            continue
        for parameter in command.params:
            default = parameter.default if type(parameter.default) in (int, float) else None
            facts = default, getattr(parameter, "min", None), getattr(parameter, "max", None)
            if parameter.name not in RuntimeOptions.model_fields and facts != (None, None, None):
                result[name, parameter.name] = facts
    return result


def test_options_have_these_defaults_and_bounds() -> None:
    assert numbers(typer.main.get_command(app)) == NUMBERS


def test_a_flag_that_is_not_given_is_off() -> None:
    waiting, flags = [typer.main.get_command(app)], []
    while waiting:
        command: Any = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        flags += [parameter for parameter in command.params if getattr(parameter, "is_flag", False)]
    assert {flag.name for flag in flags} >= {"as_json", "force", "ordered", "metrics_without_key"}
    assert [flag.opts for flag in flags if flag.default] == []


@pytest.mark.parametrize("command", ["run", "chat", "serve", "batch", "bench", "calibrate", "check"])
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


@pytest.mark.parametrize("group", [[], ["export"], ["models"]])
def test_the_list_of_commands_is_not_cut_at_80_columns(group: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in CliRunner().invoke(app, [*group, "--help"]).output.replace("[ARGS]...", "")


def test_panels_hold_options_that_exist() -> None:
    assert set(PANELS) <= set(RuntimeOptions.model_fields)


@pytest.mark.parametrize("command", [[], ["run"], ["export"], ["export", "build"]])
def test_h_prints_the_help(command: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert "Usage:" in short.output
    assert short.output == long.output


@pytest.mark.parametrize(("typed", "meant"), [("build", "export build"), ("rm", "models rm"), ("chta", "chat")])
def test_a_misspelled_command_and_one_without_its_group_are_told(typed: str, meant: str) -> None:
    done = CliRunner().invoke(app, [typed, "demo"])
    assert done.exit_code == 2
    assert f"No such command '{typed}'. Did you mean '{meant}'?" in done.output


def test_a_group_of_commands_without_a_command_prints_its_help() -> None:
    alone, asked = (CliRunner().invoke(app, ["export", *option]).output for option in ([], ["--help"]))
    assert alone.strip() == asked.strip() != ""


def test_a_shell_can_complete_commands_and_options() -> None:
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).output
    whole = (("tandemrt mod", ["models"]), ("tandemrt serve --conf", ["--config"]), ("tandemrt build exp", ["export"]))
    for words, expected in whole:
        asked = {"_TANDEMRT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        result = CliRunner().invoke(app, env=asked, prog_name="tandemrt")
        assert (result.exit_code, result.output.split()) == (0, expected)


def test_version_prints_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"tandemrt {__version__}\n")


def test_help_loses_nothing_to_markup() -> None:
    group: Any = typer.main.get_command(app)
    commands = [*group.commands.values(), *group.commands["export"].commands.values()]
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


PROGRAM = "from tandemrt.cli import main; main()"


def run_in_shell(command: str) -> tuple[int, str, str]:
    ended = subprocess.run(["sh", "-c", command, sys.executable, PROGRAM], capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("name", MODULES)
def test_a_command_is_read_without_the_others(name: str) -> None:
    alone, among_all = (typer.main.get_command(each) for each in (cli.application(name), app))
    assert {*alone.commands} == {name}  # type: ignore[attr-defined]
    assert name in among_all.commands  # type: ignore[attr-defined]


def test_a_full_disk_is_one_message_that_names_it() -> None:
    code, _, errors = run_in_shell('"$0" -c "$1" --version > /dev/full')
    assert (code, len(errors.splitlines())) == (2, 1)
    assert "No space left on device: free some space" in errors


def test_closed_standard_streams_are_no_error_and_no_file_gets_their_numbers() -> None:
    seen = "import os, sys, tandemrt.cli as c; c._open_closed_streams(); print('x'); print('y', file=sys.stderr); "
    seen += "sys.exit(0 if all(os.path.sameopenfile(n, os.open(os.devnull, 2)) for n in range(3)) else 7)"
    assert run_in_shell(f'"$0" -c "{seen}" <&- >&- 2>&-')[0] == 0
    assert run_in_shell('"$0" -c "$1" --version >&- 2>&-')[0] == 0


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "raise the limit of open files"),
        (RuntimeError("[ONNXRuntimeError] : 1 : FAIL : write failed: No space left on device"), "free some space"),
        (RuntimeError("FAIL : Load model from m.onnx failed:system error number 24"), "raise the limit of open files"),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), None),
        (RuntimeError("a bug"), None),
    ],
)
def test_errors_of_the_system_say_what_to_do_and_bugs_stay_tracebacks(
    error: Exception, advice: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "application", lambda _only: fail)
    with pytest.raises(type(error) if advice is None else SystemExit):
        cli.main()
    printed = capsys.readouterr().err
    assert (advice is None and printed == "") or (str(error) in printed and str(advice) in printed)


@pytest.mark.parametrize(("temperature", "refused"), [("0.1", True), ("0", False)])
def test_texts_that_may_differ_are_not_compared(temperature: str, refused: bool) -> None:
    command = ["run", "/absent/bundle", "x", "--compare", "--rule", "rejection", "--temperature", temperature]
    answer = CliRunner().invoke(app, command)
    assert isinstance(answer.exception, BadRequest if refused else BadBundle)
    assert ("--compare: the rejection rule" in str(answer.exception)) is refused


TOOLS = '[{"type": "function", "function": {"name": "f", "parameters": {}}}]'
TEMPLATE = ["--chat-template-kwargs", '{"a": 1}']


# The options that go together, those that do not, and the rule.
@pytest.mark.parametrize(
    ("good", "bad", "rule"),
    [
        *(
            ("check B --compare-with C --text T", f"check B {one}", "--compare-with and --text must be given together")
            for one in ("--compare-with C", "--text T")
        ),
        ("check B --invariance", "check B --invariance --compare-with C --text T", "separate checks; got both"),
        ("check B --invariance --prompts P", "check B --prompts P", "--prompts is for --invariance; got it alone"),
        ("bench B --length 3", "bench B --length 3 --prompts P", "--length: must not come with --prompts, received 3"),
        ("bench B --prompts P", "bench B --length 2 --prompts P", "--length: must not come with --prompts, received 2"),
        ("run B x --raw", "run B x --raw --image i", "--raw: must not come with --image"),
        ("run B x --image i", "run B x --image i --raw", "--raw: must not come with --image"),
        ("run B x --tools T", "run B x --raw --tools T", "must not come with chat template options, received tools"),
        ("run B x --raw", ["run", "B", "x", "--raw", *TEMPLATE], "template options, received chat_template_kwargs"),
        ("run B x --compare", "run B x --compare --rule rejection --temperature 1", "--compare: the rejection rule"),
        ("run B x --rule rejection", "run B x --rule rejection --compare --temperature 1", "use --rule coupled or"),
        ("serve B --port 0", "serve B --port 0 --replicas 2", "--replicas: needs --ray, received '?2"),
        (
            "export inspect B --gpu 80GB --gpus 2",
            "export inspect B --gpus 2",
            "--gpus: must come with --gpu.*received 2",
        ),
    ],
)
def test_options_that_need_or_exclude_others_are_refused_before_anything_opens(
    good: str, bad: str | list[str], rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("P").write_text('{"prompt": "a"}\n')
    Path("T").write_text(TOOLS)
    for command, refused in ((good.split(), False), (bad.split() if isinstance(bad, str) else bad, True)):
        error = CliRunner().invoke(app, command).exception
        assert isinstance(error, BadRequest if refused else BadRequest | BadBundle), error
        assert (re.search(rule, str(error)) is not None) is refused, error


@pytest.mark.parametrize(
    ("command", "option", "least"),
    [
        ("calibrate", "--requests", 1),
        ("calibrate", "--max-tokens", 2),
        ("bench", "--requests", 1),
        ("bench", "--length", 1),
        ("bench", "--max-tokens", 1),
        ("bench", "--repeats", 1),
        ("batch", "--max-answer", 1),
        ("run", "--max-model-len", 2),
        ("export build", "--max-model-len", 2),
        ("export triton", "--instances", 1),
    ],
)
def test_a_number_below_the_least_is_rejected_by_its_command(command: str, option: str, least: int) -> None:
    below, valid = (CliRunner().invoke(app, [*command.split(), option, str(least - off)]) for off in (1, 0))
    assert (below.exit_code, f"Invalid value for '{option}'" in below.output) == (2, True), below.output
    assert f"Invalid value for '{option}'" not in valid.output
