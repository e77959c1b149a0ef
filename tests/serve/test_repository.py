"""``tandemrt export triton``: the files it writes, and the errors that it and the server find."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tandemrt import __version__
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.parameters import server_tensors
from tandemrt.engines.validation.errors import BadRepository
from tandemrt.export.triton.check import problems
from tandemrt.export.triton.config import read_config
from tandemrt.export.triton.repository import write_model
from tools.serve import TritonServer


@pytest.fixture
def bundle(demo_bundle: Path) -> Bundle:
    return Bundle.open(demo_bundle)


def test_a_written_model_passes_the_check(bundle: Bundle, tmp_path: Path) -> None:
    model = write_model(
        bundle, tmp_path, name="served", instances=2, num_draft_tokens=3, threads=5, overlap=False, queue_limit=9
    )
    assert problems(model, bundle=bundle) == []
    config = read_config(model / "config.pbtxt")
    assert [tensor.name for tensor in config.input] == [spec.name for spec in server_tensors.inputs()]
    assert [tensor.name for tensor in config.output] == [spec.name for spec in server_tensors.OUTPUTS]
    assert (config.max_batch_size, config.model_transaction_policy.decoupled) == (0, True)
    assert config.instance_group[0].count == 2
    values = {
        name: config.parameters[name].string_value for name in ("num_draft_tokens", "threads", "overlap", "queue_limit")
    }
    assert values == {"num_draft_tokens": "3", "threads": "5", "overlap": "false", "queue_limit": "9"}


def test_the_configuration_has_the_size_of_a_paged_cache(bundle: Bundle, tmp_path: Path) -> None:
    limits = bundle.limits.model_copy(update={"cache_blocks": 64})
    paged = replace(bundle, manifest=bundle.manifest.model_copy(update={"limits": limits}))
    config = read_config(write_model(paged, tmp_path, cache_tokens=4096) / "config.pbtxt")
    assert config.parameters["cache_tokens"].string_value == "4096"


@pytest.mark.parametrize(
    ("device", "kind", "gpus"), [("cpu", 2, []), (None, 2, []), ("cuda", 1, []), ("cuda:0,2", 1, [0, 2])]
)
def test_the_device_becomes_an_instance_group(
    bundle: Bundle, tmp_path: Path, device: str | None, kind: int, gpus: list[int]
) -> None:
    [group] = read_config(write_model(bundle, tmp_path, device=device) / "config.pbtxt").instance_group
    assert (group.kind, list(group.gpus)) == (kind, gpus)


@pytest.mark.parametrize(("device", "gpus"), [("cuda", [0]), ("cuda:2,0", [0, 2]), ("cuda:0,1", None)])
def test_instances_over_ranks_share_no_gpu(bundle: Bundle, tmp_path: Path, device: str, gpus: list[int] | None) -> None:
    two = bundle.manifest.model_copy(update={"ranks": (bundle.engine("target"),)})
    ranked = replace(bundle, manifest=two)
    if gpus is None:
        with pytest.raises(BadRepository, match="named GPUs must be 2 apart, received 1 after 0"):
            write_model(ranked, tmp_path, device=device)
        return
    [group] = read_config(write_model(ranked, tmp_path, device=device) / "config.pbtxt").instance_group
    assert list(group.gpus) == gpus


def test_a_linked_bundle_moves_with_the_tree_and_a_copied_one_alone(bundle: Bundle, tmp_path: Path) -> None:
    linked = write_model(bundle, tmp_path, name="linked")
    copied = write_model(bundle, tmp_path, name="copied", copy=True)
    assert (linked / "1/bundle").is_symlink()
    assert not (linked / "1/bundle").readlink().is_absolute()
    assert not (copied / "1/bundle").is_symlink()
    moved = tmp_path / "elsewhere" / "deeper" / "copied"
    moved.parent.mkdir(parents=True)
    copied.rename(moved)
    assert problems(moved) == []


def test_writing_again_replaces_only_its_own_model(bundle: Bundle, tmp_path: Path) -> None:
    write_model(bundle, tmp_path, name="demo", num_draft_tokens=1)
    model = write_model(bundle, tmp_path, name="demo", num_draft_tokens=2)
    assert read_config(model / "config.pbtxt").parameters["num_draft_tokens"].string_value == "2"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.pbtxt").write_text('backend: "vllm"')
    with pytest.raises(BadRepository, match="must be free or a model that this command wrote"):
        write_model(bundle, tmp_path, name="other")
    assert {path.name for path in tmp_path.iterdir()} == {"demo", "other"}


def test_a_foreign_python_model_is_not_replaced(bundle: Bundle, tmp_path: Path) -> None:
    foreign = tmp_path / "demo" / "1" / "model.py"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("class TritonPythonModel: ...")
    with pytest.raises(BadRepository, match="must be free or a model that this command wrote"):
        write_model(bundle, tmp_path, name="demo")
    assert foreign.read_text() == "class TritonPythonModel: ..."


def test_a_model_is_not_linked_to_the_bundle_that_it_replaces(bundle: Bundle, tmp_path: Path) -> None:
    model = write_model(bundle, tmp_path, name="demo", copy=True)
    only = Bundle.open(model / "1/bundle")
    with pytest.raises(BadRepository, match="would be replaced with the model"):
        write_model(only, tmp_path, name="demo", num_draft_tokens=1)
    assert problems(model, bundle=bundle) == []
    write_model(only, tmp_path, name="demo", num_draft_tokens=1, copy=True)
    assert problems(model, bundle=bundle) == []


@pytest.mark.parametrize(
    "arguments", [{"num_draft_tokens": 5}, {"instances": 0}, {"device": "tpu"}, {"device": "cuda:x"}, {"name": "a/b"}]
)
def test_a_bundle_that_cannot_be_served_is_not_written(
    bundle: Bundle, tmp_path: Path, arguments: dict[str, object]
) -> None:
    with pytest.raises(BadRepository):
        write_model(bundle, tmp_path / "models", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "models").exists()


def _edit(old: str, new: str) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        config = model / "config.pbtxt"
        assert old in config.read_text()
        config.write_text(config.read_text().replace(old, new, 1))

    return edit


def _unreadable(file: Path) -> None:
    file.unlink()
    file.symlink_to("/proc/self/mem")  # a file that no user can read


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda model: (model / "config.pbtxt").unlink(), "must be a readable file"),
        (lambda model: (model / "config.pbtxt").write_text("nonsense"), "must be a model configuration"),
        (lambda model: (model / "config.pbtxt").write_bytes(b"\xff"), "must be a model configuration"),
        (lambda model: (model / "1/model.py").unlink(), "model.py must be a readable file; No such file"),
        (lambda model: _unreadable(model / "1/model.py"), "model.py must be a readable file; Input/output error"),
        (lambda model: (model / "1/model.py").write_bytes(b"\xff"), "model.py must be the file"),
        (lambda model: (model / "1/model.py").write_text("pass"), "model.py must be the file"),
        (lambda model: (model / "1/bundle").unlink(), "1/bundle' does not exist. Correct the path"),
        (_edit("decoupled: true", "decoupled: false"), "must be decoupled"),
        (_edit('backend: "python"', 'backend: "vllm"'), "backend must be 'python'"),
        (_edit('name: "top_p"', 'name: "nucleus"'), "input top_p must be there"),
        (_edit("TYPE_UINT64", "TYPE_INT64"), "input seed must be as this version writes it"),
        (_edit('string_value: "3"', 'string_value: "7"'), "num_draft_tokens must be at most the bundle's 4"),
        (_edit('string_value: "3"', 'string_value: "5"'), "num_draft_tokens must be at most the bundle's 4"),
        (_edit('key: "num_draft_tokens"', 'key: "num_draft_tokns"'), "unknown key 'num_draft_tokns'"),
        (_edit(f'string_value: "{__version__}"', 'string_value: "9.9"'), "tandemrt_version must be"),
    ],
)  # fmt: skip
def test_the_check_names_a_fault_before_a_server_starts(
    bundle: Bundle, tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    model = write_model(bundle, tmp_path, name="served", num_draft_tokens=3)
    harm(model)
    assert said in "\n".join(problems(model, bundle=bundle))


def test_a_server_with_another_python_is_reported(bundle: Bundle, tmp_path: Path) -> None:
    model = write_model(bundle, tmp_path)
    stubs = Path(next(p for p in sys.path if (Path(p) / "pytriton").is_dir())) / "pytriton/tritonserver"
    for version in ("3.10", f"3.{sys.version_info.minor}"):
        backends = tmp_path / version / "python"
        backends.mkdir(parents=True)
        stub = stubs / "python_backend_stubs" / version / "triton_python_backend_stub"
        (backends / stub.name).write_bytes(stub.read_bytes())
        lines = problems(model, backends=backends.parent)
        assert (lines == []) == (version != "3.10")
        assert all("runs 3.10" in line for line in lines)


def test_the_command_writes_checks_and_sets_its_exit_code(bundle: Bundle, tmp_path: Path) -> None:
    def run(*more: str) -> "subprocess.CompletedProcess[str]":
        command = ["export", "triton", str(bundle.folder), str(tmp_path), *more]
        code = "from tandemrt.cli import main; main()"
        return subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)

    assert run("--check").returncode == 1
    assert run("--name", "served", "--queue-limit", "7").returncode == 0
    good = run("--name", "served", "--check")
    assert (good.returncode, "ready to be served" in good.stdout) == (0, True)


def test_a_model_that_cannot_be_opened_is_reported_in_the_servers_log(bundle: Bundle, tmp_path: Path) -> None:
    model = write_model(bundle, tmp_path, copy=True)
    (model / "1/bundle/bundle.json").unlink()
    server = TritonServer(tmp_path)
    with pytest.raises(RuntimeError, match=r"bundle\.json"):
        server.start()


def test_a_repository_of_an_earlier_version_is_rejected_with_the_changed_input(bundle: Bundle, tmp_path: Path) -> None:
    """An input of another type would lose its value."""
    path = write_model(bundle, tmp_path, name="old") / "config.pbtxt"
    text = path.read_text()
    at = text.index("TYPE_INT64", text.index('"max_tokens"'))
    path.write_text(text[:at] + "TYPE_INT32" + text[at + len("TYPE_INT64") :])
    with pytest.raises(RuntimeError, match="differing in max_tokens; write the repository again"):
        TritonServer(tmp_path).start()
