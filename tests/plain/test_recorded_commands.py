"""What every command prints, and its exit code, for arguments that need no build: equal to the recorded."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandemrt.engines.user_cache import BUNDLES, CHECKPOINTS
from tandemrt.engines.validation.errors import TandemError
from tests.command_line import app
from tests.recorded import require_recorded

MODELS = ("absent", "empty")
RUNTIME: tuple[list[str], ...] = ([], ["--num-draft-tokens", "-1"], ["--threads", "0"], ["--device", "tpu"])
# command: the arguments that it requires after the model, and wrong options that its own checks name
COMMANDS: dict[str, tuple[list[str], tuple[list[str], ...]]] = {
    "run": (["prompt"], RUNTIME),
    "chat": ([], RUNTIME),
    "batch": (["prompts.jsonl", "--out", "out"], RUNTIME),
    "bench": ([], RUNTIME),
    "calibrate": (["--prompts", "prompts.jsonl"], (*RUNTIME, ["--temperature", "0"])),
    "check": ([], RUNTIME),
    "export build": ([], ([], ["--dtype", "int3"])),
    "export inspect": ([], ([], ["--gpu", "much"], ["--gpus", "2"], ["--gpus", "2", "--gpu", "80GB"])),
    "export quantize": (["--scheme", "int4"], ([],)),
}


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a command line in a folder with an empty folder and prompts."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments)
        error = result.exception
        message = f"{type(error).__name__}: {error}" if isinstance(error, TandemError | SystemExit) else repr(error)
        assert result.exit_code != 2, f"click answers, in words that change with its version: {result.output}"
        text = f"{arguments} {result.exit_code} {result.output!r} {message}"
        text = re.sub(r" \d+\.\d s |\d+-\d+-\d+ \d+:\d+", " TIME ", text)
        return text.replace(str(tmp_path.resolve()), "FOLDER")

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_answers_wrong_arguments_as_before(command: str, printed: Any) -> None:
    required, wrong = COMMANDS[command]
    lines = (printed(*command.split(), model, *required, *options) for model in MODELS for options in wrong)
    require_recorded(f"command/{command}", lines)


def test_cached_models_are_listed_and_removed_as_before(printed: Any, tmp_path: Path) -> None:
    def answers() -> Iterator[str]:
        yield printed("models", "list")
        for number, name in enumerate(
            (f"{BUNDLES}/alpha", f"{BUNDLES}/alpine", f"{CHECKPOINTS}/beta", f"{BUNDLES}/.hidden")
        ):
            folder = tmp_path / "cache" / name
            folder.mkdir(parents=True)
            (folder / "weights").write_bytes(bytes(123_456 * number))
            os.utime(folder, (1e9 + 36_000 + 86_400 * number,) * 2)
        for arguments in (["list"], ["rm", "al"], ["rm", "none"], ["rm", ""], ["rm", "alpha"], ["rm", "b"], ["list"]):
            yield printed("models", *arguments)

    require_recorded("command/models", answers())
