"""TensorRT engines that another interpreter built, run by this one: texts equal those of a CPU.

    TENSORRT_PYTHON=/path/to/python3.10 pytest tests/gpu/test_tensorrt_engines.py

The interpreter has numpy and TensorRT, 8.6 or later. With TENSORRT_HEADERS, the folder of that release's NvInfer.h,
verification is an engine with plugins. The dtype is float32, where texts this short have no scores that
rounding could swap.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.export.bundle.build import build
from tandemrt.plugins.tensorrt.modules import load
from tests.command_line import app
from tests.engine.draft_kinds import EAGLE3, SIZES
from tests.gpu.rounds import MIXED, answered, by_graphs_and_eagerly, output_of
from tests.makers import tiny_checkpoint, write_recipe

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if "TENSORRT_PYTHON" not in os.environ:
    pytest.skip("TENSORRT_PYTHON must name an interpreter that imports tensorrt", allow_module_level=True)
try:
    load("tensorrt")
except BackendUnavailable as missing:
    pytest.skip(str(missing), allow_module_level=True)

BACKEND = f"""name = "tensorrt"
layers = "basic"
python = "{os.environ["TENSORRT_PYTHON"]}"
version_compatible = true
optimization_level = 1"""
HEADERS = os.environ.get("TENSORRT_HEADERS")
if HEADERS is not None:
    BACKEND += f'\nheaders = "{HEADERS}"'


@pytest.fixture(scope="module", params=["model", "eagle3", "ngram"])
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The recipe file to write, and what it says besides the backend."""
    folder = tmp_path_factory.mktemp(request.param)
    asked: dict[str, Any] = {"target": tiny_checkpoint(folder / "target", **SIZES), "length": 200, "prefill_chunk": 64}
    if request.param == "model":
        asked["draft"] = tiny_checkpoint(folder / "draft", layers=1, seed=1, head_dim=32)
    elif request.param == "eagle3":
        asked["drafting"] = f'kind = "eagle3"\ncheckpoint = "{EAGLE3.save(folder / "head")}"\nnum_draft_tokens = 4'
    else:
        asked["drafting"] = 'kind = "ngram"\nnum_draft_tokens = 4\nngram_min = 1'
    return folder / "recipe.toml", asked


@pytest.fixture(scope="module")
def bundle(recipe: tuple[Path, dict[str, Any]]) -> Path:
    file, asked = recipe
    return build(Recipe.load(write_recipe(file, backend=BACKEND, **asked)), file.parent / "tensorrt").folder


@pytest.fixture(scope="module")
def expected(recipe: tuple[Path, dict[str, Any]]) -> list[tuple[list[int], str, str, str]]:
    """The outputs of a CPU, without speculation."""
    file, asked = recipe
    on_cpu = build(Recipe.load(write_recipe(file, **asked)), file.parent / "cpu").folder
    return output_of(answered(on_cpu, MIXED, device="cpu", num_draft_tokens=0)[0])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("window", [4, 0])
def test_texts_equal_those_of_a_cpu(bundle: Path, expected: list[Any], window: int, overlap: bool) -> None:
    outputs, metrics = answered(bundle, MIXED, num_draft_tokens=window, overlap=overlap)
    assert output_of(outputs) == expected
    assert (metrics.drafted > 0) == (window > 0)


def test_graphs_replay_what_eager_runs_compute(bundle: Path, expected: list[Any]) -> None:
    assert by_graphs_and_eagerly(bundle) == [expected, expected]


def test_16_clients_of_the_server_read_the_texts_of_a_cpu(bundle: Path, expected: list[Any]) -> None:
    conftest, config = (
        pytest.importorskip(name, exc_type=ImportError, reason="needs the packages of the extras serve and dev")
        for name in ("tests.openai.conftest", "tandemrt.runtime.servers.http.config")
    )
    # A completion's text includes reasoning, and its seed is a signed integer.
    asked = [
        ({"model": "demo", "prompt": prompt, **params}, text)
        for (prompt, params), (_, _, text, _) in zip(MIXED, expected, strict=True)
        if "<think>" not in prompt and 0 <= params.get("seed", 0) < 2**63
    ]
    bodies, texts = zip(*4 * asked, strict=True)
    with (
        conftest.serving(bundle, config.ServerConfig(port=0), RuntimeOptions()) as served,
        ThreadPoolExecutor(16) as clients,
    ):
        answers = list(clients.map(partial(served.ask, "/v1/completions"), bodies))
    assert [answer["choices"][0]["text"] for _, answer, _ in answers] == [*texts]


def test_the_check_finds_no_fault(bundle: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(bundle)])
    assert result.exit_code == 0, result.output


def test_decoders_and_plugins_are_engines_of_tensorrt(bundle: Path) -> None:
    engines = Bundle.open(bundle).manifest.engines
    names = ("target", "draft", "fuse", *(("verify", "verify_probs") if HEADERS else ()))
    assert {engines[name].backend for name in names if name in engines} == {"tensorrt"}
