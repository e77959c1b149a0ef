"""What every command prints, and its exit code, for arguments that need no build: equal to the recorded."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandemrt.engines.recipe import backend_status
from tandemrt.engines.user_cache import BUNDLES, CHECKPOINTS
from tandemrt.engines.validation.errors import TandemError
from tests.command_line import app
from tests.plain.test_bundle import write_bundle
from tests.recorded import require_recorded

COMMANDS = (
    *(["run"], ["chat"], ["batch"], ["bench"], ["calibrate"], ["check"]),
    *(["export", "build"], ["export", "inspect"], ["export", "quantize"]),
)
MODELS = ("absent", "empty")
OPTIONS: tuple[list[str], ...] = ([], ["prompts.jsonl"], ["--num-draft-tokens", "-1"], ["--threads", "0"])


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a command line in a folder with a bundle and an empty folder."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_bundle(tmp_path / "bundle")
    (tmp_path / "empty").mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments)
        error = result.exception
        message = f"{type(error).__name__}: {error}" if isinstance(error, TandemError | SystemExit) else repr(error)
        text = f"{arguments} {result.exit_code} {result.output!r} {message}"
        return text.replace(str(tmp_path.resolve()), "FOLDER")

    return run


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_answers_wrong_arguments_as_before(command: list[str], printed: Any) -> None:
    lines = (printed(*command, model, *options) for model in MODELS for options in OPTIONS)
    require_recorded(f"command/{' '.join(command)}", lines)


def test_the_doctor_names_what_is_missing_as_before(printed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> Iterator[str]:
        for versions in ({}, {"torch": "2", "onnxruntime": "1"}, {"onnxruntime-gpu": "99", "fastapi": "0.1"}):
            monkeypatch.setattr(backend_status, "package_version", versions.get)
            for what in ("onnxruntime-cpu", "bundle", "serve", "gguf", "unknown"):
                yield printed("doctor", what)

    require_recorded("command/doctor of packages", answers())


def test_cached_models_are_listed_and_removed_as_before(printed: Any, tmp_path: Path) -> None:
    def answers() -> Iterator[str]:
        yield printed("models", "list")
        for number, name in enumerate(
            (f"{BUNDLES}/alpha", f"{BUNDLES}/alpine", f"{CHECKPOINTS}/beta", f"{BUNDLES}/.hidden")
        ):
            folder = tmp_path / "cache" / "tandemrt" / name
            folder.mkdir(parents=True)
            (folder / "weights").write_bytes(bytes(123_456 * number))
            os.utime(folder, (1e9 + 36_000 + 86_400 * number,) * 2)
        for arguments in (["list"], ["rm", "al"], ["rm", "none"], ["rm", ""], ["rm", "alpha"], ["rm", "b"], ["list"]):
            yield re.sub(r"\d+:\d\d", "TIME", printed("models", *arguments))

    require_recorded("command/models", answers())
