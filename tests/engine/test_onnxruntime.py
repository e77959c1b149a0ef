"""The onnxruntime backend: what the tests of operators and decoders do not cover."""

from pathlib import Path

import pytest
import torch

from tandemrt.engines.contract import contract
from tandemrt.engines.validation.errors import BackendUnavailable, InternalError
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": None}, "logits.* is missing"),
        ({"other": torch.zeros(2)}, r"\['other'\] are not bindings"),
        ({"logits": torch.zeros(2, 1, 8, dtype=torch.float64)}, r"logits.* received torch.float64\[2, 1, 8\]"),
        ({"logits": torch.zeros(2, 8)}, r"logits.* received torch.float32\[2, 8\]"),
        ({"logits": torch.zeros(2, 8, 8)[:, :1, :]}, "logits.* must be contiguous"),
        ({"logits": torch.zeros(2, 1, 7)}, r"logits.* must have 8 = 8, received \[2, 1, 7\]"),
        ({"seed": torch.zeros(3, dtype=torch.int64)}, r"seed.* must have batch = 2, received \[3\]"),
    ],
)
def test_only_tensors_that_fit_the_contract_are_bound(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    save_model(build_propose(vocab=8, dtype="float32", draft_probs=False), tmp_path / "propose.onnx")
    bindings = contract.propose(vocab=8, dtype="float32", draft_probs=False)
    engine = OnnxRuntimeEngine.open(tmp_path / "propose.onnx", bindings, threads=1)
    tensors = {
        binding.name: torch.ones([2 if isinstance(dim, str) else dim for dim in binding.shape]).to(
            getattr(torch, binding.dtype)
        )
        for binding in (*bindings.inputs, *bindings.outputs)
    }
    engine.bind(tensors).run()
    with pytest.raises(InternalError, match=f"bind: .*{message}"):
        engine.bind({name: tensor for name, tensor in (tensors | changes).items() if tensor is not None})
