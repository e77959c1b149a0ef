"""The onnxruntime backend: what the tests of operators and decoders do not cover."""

from pathlib import Path

import pytest

from tandemrt.engines.contract import contract
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.export.graph.builder import save_model
from tandemrt.export.model.weightless import build_propose
from tandemrt.runtime.device.backends.onnxruntime.engine import OnnxRuntimeEngine
from tandemrt.runtime.device.backends.onnxruntime.sessions import require_provider


def test_a_session_that_fell_back_to_the_cpu_is_refused(tmp_path: Path) -> None:
    """onnxruntime opens a session without a provider it cannot load, and says so only in its log."""
    path = tmp_path / "propose.onnx"
    save_model(build_propose(vocab=8, dtype="float32", draft_probs=False), path)
    bindings = contract.propose(vocab=8, dtype="float32", draft_probs=False)
    session = OnnxRuntimeEngine.open(path, bindings, threads=1).session
    require_provider(session, "CPUExecutionProvider")
    with pytest.raises(BackendUnavailable, match=r"cannot use CUDAExecutionProvider .* CPUExecutionProvider instead"):
        require_provider(session, "CUDAExecutionProvider")
