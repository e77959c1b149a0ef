"""What a user installs: the wheel, in a fresh environment and outside of the checkout, does what README.md says."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
# Commands of the README that do not run here: two wait for a person or a client, the others need a model of the reader
# or of the hub.
SKIPPED = (
    *("tandemrt chat ", "tandemrt serve ", "tandemrt export build recipe.toml"),
    "tandemrt run Qwen/",
)

pytestmark = pytest.mark.timeout(900)  # minutes on a machine that is busy with other tests


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel, built from the source distribution, and what it depends on."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "built", "build", "dist", "*.egg-info", "__pycache__", "tests")
    source = shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=ignored)
    sdist = folder / built("sdist", folder, source)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    wheel = folder / built("wheel", folder, unpacked)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    [own] = subprocess.check_output([python, "-c", asked], text=True).splitlines()
    # Dependencies are those of this environment, linked one by one: the checkout is installed there as well.
    for entry in {entry for kind in ("purelib", "platlib") for entry in Path(sysconfig.get_path(kind)).iterdir()}:
        if "tandemrt" not in entry.name and entry.suffix != ".pth" and not Path(own, entry.name).exists():
            Path(own, entry.name).symlink_to(entry)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, env=environment(python))
    return python


def built(kind: str, folder: Path, source: Path) -> str:
    """Build a distribution of ``source`` into ``folder``; its name."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    lines = subprocess.check_output([sys.executable, "-c", code], cwd=source, text=True, stderr=subprocess.STDOUT)
    return lines.splitlines()[-1]


def environment(python: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"PATH": f"{python.parent}{os.pathsep}{kept['PATH']}", "OMP_NUM_THREADS": "1"}


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for of, text in fenced if of == language]


def test_every_command_of_the_readme_runs_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    commands = [line for block in blocks("") for line in block.splitlines()]
    assert all(any(line.startswith(prefix) for line in commands) for prefix in SKIPPED)
    script = "\n".join(line for line in commands if not line.startswith(SKIPPED))
    assert len(re.findall("^tandemrt ", script, re.MULTILINE)) == 5
    # Several threads of an engine spin while they wait, and take the processor of other tests.
    script, engines = re.subn(r"^(tandemrt (check|run|bench) [^#\n]+)", r"\1 --threads 1 ", script, flags=re.MULTILINE)
    assert engines == 3
    script = script.replace("tandemrt bench", "tandemrt bench --repeats 1")
    shell = ["bash", "-euxo", "pipefail", "-c", script]
    done = subprocess.run(shell, cwd=tmp_path, env=environment(installed), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "without speculation: the same text" in done.stdout
    assert "everything holds" in done.stdout
    assert "speculation / autoregressive" in done.stdout, "of prompts that bench makes up"
    for backend in ("onnxruntime-cpu", "onnxruntime-cuda", "tensorrt-rtx", "tensorrt"):
        assert f" {backend} " in done.stdout, "the doctor names it"
    for code in blocks("python"):
        python = [installed, "-c", code]
        done = subprocess.run(
            python, cwd=tmp_path, env=environment(installed), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert '"customer"' in done.stdout


def test_the_wheel_is_installed_and_not_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = "import tandemrt.engines.recipe.recipe as r; "
    code += "print(r.__file__, r.Recipe.load(r.locate('demo')).target.checkpoint)"
    paths = subprocess.check_output([installed, "-c", code], cwd=tmp_path, env=environment(installed), text=True)
    assert all(Path(line).is_relative_to(installed.parents[1]) for line in paths.split())


def test_a_pair_whose_checkpoints_are_nowhere_is_refused_by_its_name_on_the_hub(
    installed: Path, tmp_path: Path
) -> None:
    command = [installed.parent / "tandemrt", "export", "build", "qwen3-8b"]
    offline = environment(installed) | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    said = "target.checkpoint: must be an existing folder or a name of the Hugging Face hub; got 'Qwen/Qwen3-8B'"
    assert said in " ".join(done.stderr.split())
