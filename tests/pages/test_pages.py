"""Every command and every block of the pages for new users does what the page says."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tandemrt import LLM, SamplingParams, StructuredOutputs
from tests.command_line import app
from tests.makers import tiny_checkpoint, write_recipe
from tests.pages.blocks import BLOCKS, PAGES, ROOT, Block, block, blocks_of
from tests.waiting import PATIENCE_S

BUNDLE = "engines/built/demo"
ADDRESS = "http://127.0.0.1:8000"
SERVE = f"tandemrt serve {BUNDLE}"
CHAT = f"tandemrt chat {BUNDLE}"

RUN = (
    f'tandemrt run {BUNDLE} "Please put 1 pine box at £26.55 on the account of Leo Conti." --trace out.html',
    "tandemrt export build recipe.toml --out my-model",
)
BUILD = f"tandemrt export build demo --out {BUNDLE}"
IN_README = (  # tests/engine/test_wheel.py runs them in an installed wheel
    BUILD,
    f"tandemrt check {BUNDLE}",
    f'tandemrt run {BUNDLE} "Put 1 pine box at £26.55 on the account of Leo Conti." '
    "--budget 64 --compare --trace out.html",
    f"tandemrt bench {BUNDLE} --max-tokens 64",
    "tandemrt doctor",
)
NOT_RUN = {
    "make demo": "sets up an environment; the two commands of this target are run by tests",
    "source .venv/bin/activate": "the environment of make demo",
    'tandemrt run Qwen/Qwen3-0.6B "What is speculative decoding?"': "fetches a model from the hub",
    'tandemrt run Qwen/Qwen3-VL-2B-Instruct --image receipt.png "What is on this receipt?"': "the same",
    "pip install '.[cpu,serve]'": "sets up an environment",
    f"python -m tools.bench.serving load {ADDRESS}/v1 http://127.0.0.1:9000/v1 --clients 1,16,64 --rates 4,8": (
        "two servers, minutes; tests/openai/test_bench_serving.py runs the command"
    ),
    f"python -m tools.bench.serving load {ADDRESS}/v1 --prompts sharegpt.json --requests 512": "the same",
    f"vllm bench serve --backend openai --base-url {ADDRESS} --tokenizer {BUNDLE}/tokenizer": (
        "not installed here; tests/openai/test_load_generators.py sends its requests"
    ),
    f"aiperf profile --model demo --url {ADDRESS} --endpoint-type chat --streaming --tokenizer {BUNDLE}/tokenizer": (
        "the same"
    ),
}
"""Commands of the pages that no test runs as they stand, with the reason."""
BATCH = block("docs/openai.md", "python", "file = client.files.create")
"""A block with a pause. tests/openai/test_batches_api.py makes its calls."""

# Python imports the tree of the tests, whichever tree is installed.
ENVIRONMENT = os.environ | {"COLUMNS": "200", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


@pytest.fixture(scope="module")
def folder(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's working folder: it contains the demo's bundle."""
    place = tmp_path_factory.mktemp("reader")
    write_recipe(place / "recipe.toml", target=tiny_checkpoint(place / "tiny"))
    shutil.copytree(demo_bundle, place / BUNDLE)
    return place


def run(command: str, folder: Path, typed: str = "") -> str:
    """Run a command of a page in ``folder``, and return what it prints."""
    done = subprocess.run(
        program(command),
        cwd=folder,
        input=typed,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def program(command: str) -> list[str]:
    """Return a command of this environment."""
    name, *arguments = shlex.split(command)
    return [sys.executable if name == "python" else str(Path(sys.executable).parent / name), *arguments]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[str, Path]]:
    """The address of ``tandemrt serve``, on a free port, and its log."""
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            program(f"{SERVE} --port 0"), cwd=folder, stdout=subprocess.PIPE, stderr=output, text=True, env=ENVIRONMENT
        )
        try:
            assert process.stdout is not None
            printed = next(line for line in process.stdout if "http://127.0.0.1:" in line)
            yield re.findall(r"http://127\.0\.0\.1:\d+", printed)[0], log
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE_S)


def test_every_command_is_run_or_says_why_not() -> None:
    commands = {command for each in BLOCKS for command in each.commands if not LOG.fullmatch(command)}
    assert commands == {*RUN, *IN_README, SERVE, CHAT, *NOT_RUN}


def test_the_commands_of_the_readme_are_in_its_blocks() -> None:
    assert set(IN_README) <= {command for each in blocks_of("README.md") for command in each.commands}


def test_every_block_of_another_language_is_known() -> None:
    """A new one needs a test below."""
    blocks = [(each.page, each.language) for each in BLOCKS if each.language]
    assert sorted(blocks) == sorted(
        [
            *[("README.md", "text")] * 2,
            ("README.md", "python"),
            ("docs/guide.md", "toml"),
            ("docs/guide.md", "python"),
            *[("docs/openai.md", "python")] * 4,
            ("docs/openai.md", "text"),
            ("docs/structured.md", "python"),
        ]
    )


@pytest.mark.parametrize("command", RUN)
def test_a_command_succeeds(folder: Path, command: str) -> None:
    run(command, folder)
    if "--trace" in command:
        assert "Leo Conti" in (folder / "out.html").read_text()


def test_the_example_prints_what_stands_under_it(folder: Path) -> None:
    (folder / "example.py").write_text(block("README.md", "python", "from tandemrt import").text)
    assert run("python example.py", folder) == block("README.md", "text", "Order of").text


def test_the_demo_prints_what_the_page_shows(folder: Path) -> None:
    printed = run(f"python -m tools.demo.demo {BUNDLE}", folder)
    shown = block("README.md", "text", "valid against").text
    assert re.sub(r"\d+ ms", "", printed).count(re.sub(r"\d+ ms", "", shown)) == 1
    assert printed.count("valid against its schema") == printed.count("same text with speculation off") == 4
    assert "the budget ended the reasoning" in printed


def test_make_demo_runs_commands_that_tests_run() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.split("\ndemo: ")[1].split("\n\n")[0].replace("$(DEMO)", "demo")
    assert re.findall(r"@\$\(BIN\)/(.*)", recipe) == [BUILD, f"python -m tools.demo.demo {BUNDLE}"]


def test_a_chat_answers_and_leaves(folder: Path) -> None:
    printed = run(CHAT, folder, typed="Put 1 pine box at £26.55 on the account of Leo Conti.\n")
    assert "Order of Leo Conti" in printed
    assert "tokens per round" in printed


def test_clients_of_the_server_get_answers(server: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    address, log = server
    names: dict[str, Any] = {}
    printed = []
    for each in BLOCKS:
        if (each.page, each.language) == ("docs/openai.md", "python") and each != BATCH:
            assert ADDRESS in each.text or "client" in names
            execute(each, names, address)
            printed.append(capsys.readouterr().out)
    assert printed[0] == block("docs/openai.md", "text", "Order of").text
    assert names["response"].output_text
    assert [part.type for part in names["message"].content] == ["thinking", "text"]
    lines = log.read_text().splitlines()
    assert any(LOG.fullmatch(line) and "/v1/chat/completions" in line for line in lines), lines
    [example] = [command for each in BLOCKS for command in each.commands if LOG.fullmatch(command)]
    assert "/v1/chat/completions" in example


LOG = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO 127\.0\.0\.1 POST '/v1/[\w/]+' 200 \d+ ms \d+ tokens "
    r"\d+\.\d\d tokens/round"
)
"""A line of the server's log, of which docs/openai.md shows one."""


def test_the_recipe_of_the_guide_is_that_of_the_demo() -> None:
    shown = tomllib.loads(block("docs/guide.md", "toml", "name").text)
    demo = tomllib.loads((ROOT / "engines/recipes/demo.toml").read_text())
    folder = ROOT / "engines" / "recipes"
    for model in ("target", "draft"):
        ours, theirs = (Path(folder / each[model].pop("checkpoint")).resolve() for each in (shown, demo))
        assert ours == theirs
    for section, values in shown.items():
        assert values == demo[section] or values.items() <= demo[section].items()


def test_the_blocks_of_the_guide_and_of_structured_outputs_run(folder: Path) -> None:
    schema = {"type": "object", "properties": {"of": {"const": "boxes"}}, "required": ["of"]}
    names: dict[str, Any] = {"StructuredOutputs": StructuredOutputs, "schema": schema}
    names["params"] = SamplingParams(temperature=0.0, max_tokens=40)
    with LLM(folder / BUNDLE, threads=1) as llm:
        names["llm"] = llm
        execute(block("docs/guide.md", "python", "from tandemrt import Chat"), names)
        assert names["output"].text
        execute(block("docs/structured.md", "python", "tags = "), names)
        params = SamplingParams(max_tokens=40, structured_outputs=names["structured"], thinking_token_budget=0)
        assert llm.generate("Count", params).finish_reason in ("stop", "length")


def execute(shown: Block, names: dict[str, Any], address: str = ADDRESS) -> None:
    exec(shown.text.replace(ADDRESS, address), names)  # noqa: S102 - the page's own code


@pytest.mark.parametrize("page", PAGES)
def test_options_in_commands_of_the_text_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    shown = re.findall(r"`(tandemrt [^`]+)`", text)
    for command in [*shown, *(each for part in BLOCKS if part.page == page for each in part.commands)]:
        name, *words = shlex.split(command)
        if name == "tandemrt":
            _check_options(command, words)


def _check_options(command: str, words: list[str]) -> None:
    part: Any = typer.main.get_command(app)
    while hasattr(part, "commands") and words and not words[0].startswith("-"):
        assert words[0] in part.commands, command
        part = part.commands[words.pop(0)]
    options = {name for parameter in part.params for name in [*parameter.opts, *parameter.secondary_opts]}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options | {"--help"}, command
