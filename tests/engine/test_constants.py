"""What operators read that depends on no input: from its file where it lies in one, and computed where it does not."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.export.graph.builder import GraphBuilder, save_model
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.backends.onnxruntime import constants
from tandemrt.runtime.device.backends.onnxruntime.constants import constants_of, read_constants, stored_parts
from tandemrt.runtime.device.backends.onnxruntime.sessions import CPU, open_session

VALUES = np.arange(24).astype(ml_dtypes.bfloat16).reshape(6, 4)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Constants over a file of six rows: all rows, two parts in turns, a value computed from one row, and a scalar."""
    (tmp_path / "rows.bin").write_bytes(b"...." + VALUES.tobytes())
    b = GraphBuilder("constants")
    whole, upper, lower = (
        b.external(name, "bfloat16", (count, 4), "rows.bin", 4 + first * 8, count * 8)
        for name, first, count in (("whole", 0, 6), ("upper", 0, 2), ("lower", 3, 3))
    )
    b.output(Binding("stored", "bfloat16", (6, 4)), b.op("Identity", whole))
    b.output(Binding("joined", "bfloat16", (5, 4)), b.op("Concat", lower, upper, axis=0))
    b.output(Binding("side_by_side", "bfloat16", (2, 8)), b.op("Concat", upper, upper, axis=1))
    b.output(Binding("computed", "float32", (2, 4)), b.cast(upper, "float32"))
    b.output(Binding("scalar", "bfloat16", ()), b.op("Identity", b.external("last", "bfloat16", (), "rows.bin", 50, 2)))
    save_model(b.model(), tmp_path / "constants.onnx")
    return tmp_path / "constants.onnx"


def test_weights_come_from_their_files_and_the_rest_is_computed(graph: Path) -> None:
    assert set(stored_parts(graph)) == {"stored", "joined"}
    constants = read_constants(graph, torch.device("cpu"))
    computed = constants_of(open_session(graph, [CPU]))
    assert set(constants) == set(computed) == {"stored", "joined", "side_by_side", "computed", "scalar"}
    for name, tensor in computed.items():
        assert constants[name].dtype == tensor.dtype
        np.testing.assert_array_equal(np.asarray(constants[name]), np.asarray(tensor))
    np.testing.assert_array_equal(np.asarray(constants["joined"]), VALUES[[3, 4, 5, 0, 1]])
    assert np.asarray(constants["scalar"]) == VALUES[5, 3]


def test_no_session_has_what_a_file_has(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session computes all outputs of its graph, whatever is asked of it: all weights would be copied."""
    opened: list[list[str]] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        session = open_session(*arguments, **options)
        opened.append([output.name for output in session.get_outputs()])
        return session

    monkeypatch.setattr(constants, "open_session", noted)
    read_constants(graph, torch.device("cpu"))
    assert opened == [["side_by_side", "computed", "scalar"]]


def test_a_truncated_file_is_rejected(graph: Path) -> None:
    file = graph.parent / "rows.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadBundle, match=r"rows\.bin: is shorter than its graph requires; build the bundle again"):
        read_constants(graph, torch.device("cpu"))
