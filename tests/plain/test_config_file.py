"""``--config FILE``, and the names that ``vllm serve`` has for options."""

import re
from pathlib import Path
from typing import Annotated, Any

import click
import pytest
import typer
from typer.testing import CliRunner

from tandemrt.engines.options.command_options import CommandWithSections, takes_options
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.options.vllm_names import ADVICE, ALIASES, own_name
from tandemrt.engines.validation.errors import BadRequest
from tests.command_line import app as tandemrt

COMMANDS = Path(__file__).parents[2] / "docs" / "commands.md"


def received(*arguments: str) -> dict[str, Any]:
    """Return what a command with options of every kind receives."""
    values: dict[str, Any] = {}
    app = typer.Typer(context_settings={"token_normalize_func": own_name})

    @app.command(cls=CommandWithSections)
    @takes_options()
    def command(
        models: list[str],
        port: Annotated[int, typer.Option(min=0)] = 8000,
        dashboard: Annotated[bool, typer.Option()] = False,
        temperature: Annotated[list[float] | None, typer.Option()] = None,
        as_json: Annotated[bool, typer.Option("--json")] = False,
        *,
        options: RuntimeOptions,
    ) -> None:
        own = {"models": models, "port": port, "dashboard": dashboard, "temperature": temperature, "json": as_json}
        values.update(own | options.arguments())

    outcome = CliRunner().invoke(app, arguments, standalone_mode=False)
    if outcome.exception is not None:
        raise outcome.exception
    return values


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.toml"


def test_a_file_sets_options_of_every_kind(file: Path) -> None:
    file.write_text(
        'models = ["demo", "b=other"]\nport = 9000\ndashboard = true\njson = true\ntemperature = [0, 0.5]\n'
        'num-draft-tokens = "1:4,33:2"\nprefix_caching = false\ngrammar_timeout_s = 2\ndevice = "cpu"\n'
    )
    assert received("--config", str(file)) == {
        "models": ["demo", "b=other"],
        "port": 9000,
        "dashboard": True,
        "json": True,
        "temperature": [0.0, 0.5],
        "num_draft_tokens": {1: 4, 33: 2},
        "prefix_caching": False,
        "grammar_timeout_s": 2.0,
        "device": "cpu",
    }
    file.write_text('models = "demo"\nnum_draft_tokens = 2\n')
    assert received("--config", str(file))["models"] == ["demo"]
    assert received("--config", str(file))["num_draft_tokens"] == 2


@pytest.mark.parametrize("first", [True, False])
def test_the_command_line_wins_over_the_file(file: Path, first: bool) -> None:
    file.write_text('models = ["a", "b"]\nport = 9000\ndashboard = true\nprefix_caching = true\nthreads = 2\n')
    config, others = ["--config", str(file)], ["c", "--port", "1", "--no-dashboard", "--no-prefix-caching"]
    values = received(*config, *others) if first else received(*others, *config)
    assert (values["models"], values["port"], values["dashboard"]) == (["c"], 1, False)
    assert (values["prefix_caching"], values["threads"]) == (False, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot = 1", r"serve\.toml: unknown key 'prot' \(did you mean 'port'\?\)"),
        ("config = 'other.toml'", "unknown key 'config'"),
        ("max_num_seqs = 8", "--max-num-seqs: is an option of vLLM; set limits.batch in a recipe"),
        ("port = {a = 1}", r"serve\.toml: port must be a text, a number, true or false, received \{'a': 1\}"),
        ("port = [1, 2]", r"port must be a text, a number, true or false, received \[1, 2\]"),
        ("port =", "--config: must be a readable TOML file, received .*: Invalid value"),
        (None, "--config: must be a readable TOML file, received .*: No such file or directory"),
    ],
)
def test_a_wrong_file_is_rejected_with_the_reason(file: Path, content: str | None, message: str) -> None:
    if content is not None:
        file.write_text(content)
    with pytest.raises(BadRequest, match=message):
        received("demo", "--config", str(file))


@pytest.mark.parametrize(
    "content", ["port = 1.5", "port = true", "port = -1", "dashboard = 'perhaps'", "temperature = ['x']"]
)
def test_a_value_of_another_type_is_rejected_and_not_converted(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(typer.BadParameter, match="Input should be") as caught:
        received("demo", "--config", str(file))
    assert caught.value.param is not None
    assert caught.value.param.name == content.split()[0]
    file.write_text("threads = 0")
    with pytest.raises(BadRequest, match="threads: must be at least 1, received 0"):
        received("demo", "--config", str(file))


def test_names_of_vllm_are_aliases_or_say_what_to_write(file: Path) -> None:
    assert received("demo", "--no-enable-prefix-caching", "--enforce-eager")["prefix_caching"] is False
    assert received("demo", "--enforce-eager")["cuda_graphs"] is False
    file.write_text("enable_prefix_caching = true")
    assert received("demo", "--config", str(file))["prefix_caching"] is True
    for name, advice in ADVICE.items():
        with pytest.raises(BadRequest, match=f"^--{name}: is an option of vLLM; ") as caught:
            received("demo", f"--{name}", "8")
        assert str(caught.value).endswith(advice)


def test_the_documents_list_the_names_of_vllm() -> None:
    rows = dict(re.findall(r"^\| `--([\w-]+)` \| (.*) \|$", COMMANDS.read_text(), re.MULTILINE))
    assert rows == {name: f"`--{own}`" for name, own in ALIASES.items()} | ADVICE


def test_aliases_and_advice_name_options_that_exist() -> None:
    """An option that is added later under vLLM's name must leave the table."""
    group: Any = typer.main.get_command(tandemrt)
    commands: list[click.Command] = [*group.commands.values(), *group.commands["export"].commands.values()]
    options = {name for command in commands for p in command.params for name in (*p.opts, *p.secondary_opts)}
    assert {f"--{name}" for name in ALIASES.values()} <= options
    assert not {f"--{name}" for name in (*ALIASES, *ADVICE)} & options
    named = {word.strip(",;") for advice in ADVICE.values() for word in advice.split() if word.startswith("--")}
    assert named <= options
