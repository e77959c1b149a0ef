"""``tandemrt serve`` starts the ranks of a target over two GPUs, and ends with them."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tests.gpu.rounds import paged
from tests.makers import tiny_checkpoint, write_recipe
from tests.waiting import PATIENCE_S, eventually, receive_interrupts

_NEEDS = {"exc_type": ImportError, "reason": "needs the packages of the extra serve: pip install '.[serve]'"}
pytest.importorskip("uvicorn", **_NEEDS)
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
OPTIONS: list[str] = []


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    recipe = write_recipe(
        folder / "r.toml",
        target=tiny_checkpoint(folder / "target", head_dim=32, seed=1),
        backend=f"{paged()}\ntensor_parallel = 2",
        dtype="bfloat16",
    )
    return build(Recipe.load(recipe), folder / "bundle").folder


@contextmanager
def serving(bundle: Path) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """The server's process, its port, and the process of rank 1."""
    command = [sys.executable, "-c", "from tandemrt.cli import main; main()", "serve", f"mine={bundle}", "--port", "0"]
    with subprocess.Popen(
        command + OPTIONS, stdout=subprocess.PIPE, text=True, preexec_fn=receive_interrupts
    ) as process:
        try:
            assert process.stdout is not None
            port = urlsplit(process.stdout.readline().split()[-1]).port
            assert port is not None
            status, body = ask(port, "/v1/completions", {"prompt": "x", "max_tokens": 8, "ignore_eos": True})
            assert (status, body["usage"]["completion_tokens"]) == (200, 8)
            [rank] = [child for child in children(process.pid) if "spawn_main" in command_of(child)]
            yield process, port, rank
        finally:
            process.kill()


def ask(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request(
            "POST" if body else "GET", path, json.dumps(body) if body else None, {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def children(parent: int) -> list[int]:
    pids = [Path(folder, "children").read_text().split() for folder in Path(f"/proc/{parent}/task").iterdir()]
    return [int(child) for each in pids for child in each]


def command_of(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_server(bundle: Path, end: signal.Signals) -> None:
    with serving(bundle) as (process, _, rank):
        if end == signal.SIGKILL:
            os.kill(rank, signal.SIGSTOP)
        process.send_signal(end)
        assert process.wait(PATIENCE_S) == (-end if end == signal.SIGKILL else 0)
        assert eventually(lambda: not Path(f"/proc/{rank}").exists() or not command_of(rank))


def test_a_killed_rank_is_named_and_the_server_says_that_it_is_closed(bundle: Path) -> None:
    with serving(bundle) as (_, port, rank):
        os.kill(rank, signal.SIGKILL)
        assert eventually(lambda: ask(port, "/health")[0] == 503)
        status, body = ask(port, "/v1/completions", {"prompt": "x"})
        assert status >= 500
        assert "rank 1 was ended by SIGKILL" in body["error"]["message"]
