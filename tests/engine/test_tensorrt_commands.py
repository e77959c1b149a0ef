"""``export build --backend`` and what ``export inspect`` tells of the engines it made."""

import re
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import Run
from tests.makers import tiny_checkpoint, write_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    tiny_checkpoint(folder / "target", layers=1, head_dim=32)
    write_recipe(folder / "tiny.toml", target=folder / "target")
    return folder


@pytest.fixture
def run(run: Run) -> Run:
    """The same, with what was wrapped at the width of a terminal in single spaces."""

    def run_unwrapped(*arguments: str) -> tuple[int, str, str]:
        code, out, err = run(*arguments)
        return code, re.sub(r"\s+", " ", out), re.sub(r"\s+", " ", err)

    return run_unwrapped


def test_a_recipe_for_a_cpu_builds_for_rtx_gpus_when_asked_to(run) -> None:
    code, out, err = run("export", "build", "tiny.toml", "--backend", "tensorrt-rtx", "--dtype", "float16")
    assert (code, err) == (0, "")
    code, out, _ = run("export", "inspect", "tiny", "--all")
    assert code == 0
    assert "native layers 1 attention, 2 cache update, 2 rotary embedding" in out
    assert "built for sm_75+sm_80+sm_86+sm_89+sm_120+sm_121" in out
    assert "profile prefill token_ids [1-4 (best 1), 1-16]" in out
    assert "everything holds" in out


def test_a_damaged_report_of_an_engine_is_named_and_hides_nothing_else(run, folder: Path) -> None:
    assert run("export", "build", "tiny.toml", "--out", "d", "--backend", "tensorrt-rtx", "--dtype", "float16")[0] == 0
    (folder / "d/target/model.inspect.json").write_text("{")
    code, out, err = run("export", "inspect", "d")
    assert (code, err) == (1, "")
    assert "target/model.inspect.json must have" in out
    assert "profile prefill" not in out
    assert "1 problem(s)" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backend", "tensorrt-rtx"), "float16 or bfloat16 when backend.name is 'tensorrt-rtx'"),
        (
            ("--backend", "tensorrt-xl"),
            "backend.name: must be one of 'onnxruntime-cpu', ",
        ),
        (("--dtype", "int2"), "target.dtype: must be 'float32', 'float16', 'bfloat16', 'int8' or 'int4'; got 'int2'"),
        (("--timing-cache", "timings"), "--timing-cache needs backend.name 'tensorrt'; got 'onnxruntime-cpu'"),
        (
            ("--backend", "tensorrt-rtx", "--dtype", "float16", "--timing-cache", "timings"),
            "--timing-cache needs backend.name 'tensorrt'; got 'tensorrt-rtx'",
        ),
        (
            ("--backend", "tensorrt", "--dtype", "float16", "--timing-cache", "."),
            "--timing-cache must be a file that can be written; got '.'",
        ),
        (
            ("--backend", "tensorrt", "--dtype", "float16", "--timing-cache", "tiny.toml/timings"),
            "--timing-cache must be a file that can be written; got 'tiny.toml/timings'",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_built(run, folder: Path, options, message) -> None:
    code, _, err = run("export", "build", "tiny.toml", "--out", "refused", *options)
    assert code == 2
    assert message in err
    assert not (folder / "refused").exists()


def test_tensorrt_that_is_not_installed_is_named_with_what_installs_it(run, folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    code, _, err = run("export", "build", "tiny.toml", "--out", "none", "--backend", "tensorrt", "--dtype", "float16")
    assert code == 2
    assert "needs the module tensorrt, which cannot be imported" in err
    assert "pip install '.[tensorrt]' in a checkout, else pip install 'tandemrt[tensorrt]'" in err
    assert not (folder / "none").exists()
