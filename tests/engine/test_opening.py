"""Where a bundle is opened: what is no such place, or no place for it, is refused before anything is loaded."""

import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import FILE_NAME, Delimiter, EngineName, Manifest
from tandemrt.engines.validation.errors import BackendUnavailable, BadBundle, BadRequest
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.backends.onnxruntime.sessions import CPU, open_session
from tandemrt.runtime.device.backends.opening import open_engines


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "meta", ""])
def test_a_device_that_is_neither_cpu_nor_cuda_is_refused_by_name(tiny_bundle: Path, device: str) -> None:
    with pytest.raises(BadRequest, match=f"device: must be 'cpu', 'cuda' or 'cuda:N', received '{device}'"):
        LLM(tiny_bundle, device=device)


def test_without_a_gpu_the_advice_fits_the_device_that_the_bundle_was_built_for(tiny_bundle: Path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    advice = r"\(cpu\); leave it out, or build the bundle again with backend.name 'onnxruntime-cuda' for a machine with"
    with pytest.raises(BackendUnavailable, match=f"no CUDA GPU here, received 'cuda' for engines .* {advice} a GPU$"):
        LLM(tiny_bundle, device="cuda")


def test_a_gpu_that_is_not_there_is_refused_with_how_many_there_are(tiny_bundle: Path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(BackendUnavailable, match="device: torch finds 2 GPUs here, received 'cuda:2'; count from 0"):
        LLM(tiny_bundle, device="cuda:2")


_SERVE = """
import sys
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.cli.serve import _import_for_gpu
_import_for_gpu(sys.argv[1:], RuntimeOptions(device="cuda"))
import tandemrt.plugins.kernels.module
"""


def test_early_imports_of_a_server_are_complete_where_kernels_import_them(tiny_bundle: Path) -> None:
    """A thread that imported cuda.core made it look complete to others, and the start failed."""
    subprocess.run([sys.executable, "-c", _SERVE, str(tiny_bundle)], check=True)


@pytest.mark.parametrize("threads", [0, -1])
def test_fewer_threads_than_one_are_refused(tiny_bundle: Path, threads: int) -> None:
    with pytest.raises(BadRequest, match=f"threads: must be at least 1, received {threads}"):
        LLM(tiny_bundle, threads=threads)


def test_bfloat16_on_a_cpu_is_refused_with_what_can_be_done(tiny_bundle: Path, tmp_path: Path, monkeypatch) -> None:
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    manifest = Manifest.read(folder)
    said = {"backend": "onnxruntime-cuda", "built_for": "cuda", "dtype": "bfloat16"}
    engines = {name: engine.model_copy(update=said) for name, engine in manifest.engines.items()}
    (folder / FILE_NAME).write_text(manifest.model_copy(update={"engines": engines}).to_json())
    with pytest.raises(BackendUnavailable, match=r"device: .*bfloat16.*received 'cpu'.*--dtype float16"):
        LLM(folder, device="cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BackendUnavailable) as caught:
        LLM(folder)
    assert "use device='cpu'" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"stop_ids": (264,)},
            "reasoning delimiters and stop tokens disagree: thinking.think_start: must not contain a stop token",
        ),
        (
            {"forced_end": (70, 71)},
            "reasoning delimiters and stop tokens disagree: forced_end: must contain one of think_ends",
        ),
        (
            {"implicit_ends": (265,)},
            "reasoning delimiters and stop tokens disagree: implicit_ends: .* is also one of think_ends",
        ),
    ],
)
def test_delimiters_that_would_refuse_every_request_are_refused_on_opening(
    tiny_bundle: Path, tmp_path: Path, change: dict[str, tuple[int, ...]], message: str
) -> None:
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    manifest = Manifest.read(folder)
    assert manifest.reasoning is not None
    [(name, ids)] = change.items()
    delimiter = Delimiter(text="x", ids=ids)
    if name == "stop_ids":
        changed = manifest.model_copy(update=change)
    else:
        value = (delimiter,) if name == "implicit_ends" else delimiter
        changed = manifest.model_copy(update={"reasoning": manifest.reasoning.model_copy(update={name: value})})
    (folder / FILE_NAME).write_text(changed.to_json())
    with pytest.raises(BadBundle, match=message):
        LLM(folder, threads=1)


@pytest.mark.parametrize("engine", ["target", "draft", "adjust", "verify", "verify_probs", "propose", "propose_probs"])
@pytest.mark.parametrize("change", ["alias", "binding", "length", "dtype"])
def test_a_contract_that_is_not_what_the_sizes_of_the_bundle_say_is_refused(
    tiny_bundle: Path, tmp_path: Path, engine: EngineName, change: str
) -> None:
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    manifest = Manifest.read(folder)
    entry = manifest.engines[engine]
    inputs, aliases = entry.contract.inputs, entry.contract.aliases
    match change:
        case "alias":
            aliases = () if aliases else (("tokens", "logits"),)
        case "binding":
            inputs = tuple(each for each in inputs if each.name not in ("logits", "past_key.0"))
        case "length":
            inputs = tuple(
                replace(each, shape=tuple(2 * dim if isinstance(dim, int) else dim for dim in each.shape))
                for each in inputs
            )
        case "dtype":
            inputs = tuple(replace(each, dtype="complex64") for each in inputs)
    changed = entry.model_copy(update={"contract": replace(entry.contract, inputs=inputs, aliases=aliases)})
    engines = {**manifest.engines, engine: changed}
    (folder / FILE_NAME).write_text(manifest.model_copy(update={"engines": engines}).to_json())
    with pytest.raises(BadBundle, match=rf"engines\.{engine}\.contract must follow from limits, vocab and dtype; "):
        LLM(folder, threads=1)


def test_a_bundle_larger_than_memory_is_refused_in_our_words(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    manifest = Manifest.read(folder)
    limits = manifest.limits.model_copy(update={"batch": 10**13})
    (folder / FILE_NAME).write_text(manifest.model_copy(update={"limits": limits}).to_json())
    with pytest.raises(BadBundle, match=r"cannot run here: .*; build it with smaller limits"):
        LLM(folder, threads=1)


@pytest.mark.parametrize("refused", [1, 2, 1000])
def test_a_bundle_opens_with_the_threads_that_the_system_gives(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    start, left = threading.Thread.start, refused

    def refusing(thread: threading.Thread) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refusing)
        llm = LLM(tiny_bundle, device="cpu", threads=1)
    assert left < refused
    with llm:
        assert len(llm.generate("ab", SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


def test_an_engine_whose_threads_the_system_refuses_is_no_bad_bundle(tiny_bundle: Path) -> None:
    script = """
import os, resource, sys
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.runtime.device.backends.onnxruntime.sessions import CPU, open_session
if os.getuid() == 0:  # has no limit
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
open_session(sys.argv[1], [CPU], threads=1)
try:
    open_session(sys.argv[1], [CPU], threads=2)
except BackendUnavailable as error:
    print(error)
"""
    with TemporaryDirectory() as folder:  # pytest's folders are their owner's alone
        Path(folder).chmod(0o755)
        engine = shutil.copy(Bundle.open(tiny_bundle).path("verify"), folder)
        done = subprocess.run([sys.executable, "-c", script, engine], capture_output=True, text=True, check=True)
    assert "onnxruntime could not start its threads" in done.stdout
    assert "use fewer (threads) or raise the limit (ulimit -u)" in done.stdout


def test_an_engine_that_the_bundle_does_not_have_is_named(tiny_bundle: Path) -> None:
    bundle = Bundle.read(tiny_bundle)
    with pytest.raises(BadBundle, match="must hold engine 'draft_4'"):
        open_engines(bundle, torch.device("cpu"), 1, ["draft_4"])


def test_a_file_that_is_no_graph_is_a_bad_bundle(tmp_path: Path) -> None:
    (tmp_path / "engine.onnx").write_bytes(b"no graph")
    with pytest.raises(BadBundle, match=r"engine.onnx: onnxruntime cannot load this engine: .*; build the bundle"):
        open_session(tmp_path / "engine.onnx", [CPU])
