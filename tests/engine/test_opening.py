"""Where a bundle is opened: what is no such place, or no place for it, is refused before anything is loaded."""

import shutil
from pathlib import Path

import pytest

from tandemrt import LLM
from tandemrt.engines.errors import BackendUnavailable, BadRequest
from tandemrt.engines.manifest import FILE_NAME, Manifest


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "meta", ""])
def test_a_device_that_is_neither_cpu_nor_cuda_is_refused_by_name(tiny_bundle: Path, device: str) -> None:
    with pytest.raises(BadRequest, match=f"device: must be 'cpu', 'cuda' or 'cuda:N', received '{device}'"):
        LLM(tiny_bundle, device=device)


def test_a_gpu_that_is_not_there_is_refused_with_how_many_there_are(tiny_bundle: Path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(BackendUnavailable, match="device: torch finds 2 GPUs here, received 'cuda:2'; count from 0"):
        LLM(tiny_bundle, device="cuda:2")


@pytest.mark.parametrize("threads", [0, -1])
def test_fewer_threads_than_one_are_refused(tiny_bundle: Path, threads: int) -> None:
    with pytest.raises(BadRequest, match=f"threads: at least one is needed, received {threads}"):
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
