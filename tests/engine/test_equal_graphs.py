"""Subgraphs that differ only in names and vectors share a session, and each keeps its own vectors."""

from pathlib import Path

import onnx_ir as ir
import torch

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.runtime.device.backends.onnxruntime.subgraphs import open_subgraphs

CPU = torch.device("cpu")


def scaled(
    folder: Path, name: str, scale: list[float], operator: str = "Mul", *, in_file: bool = True
) -> tuple[Path, Contract]:
    """Write ``name``.out = ``operator``(``name``.x, scale); return the file and its contract.

    The scale lies ``in_file``, or in the graph.
    """
    weight = ir.Value(name=f"{name}.scale", const_value=ir.tensor(scale, dtype=ir.DataType.FLOAT))
    x, y = (
        ir.Value(name=f"{name}.{end}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["tokens", len(scale)]))
        for end in ("x", "out")
    )
    node = ir.node(operator, [x, weight], outputs=[y], name=f"{name}/node")
    graph = ir.Graph([x], [y], nodes=[node], initializers=[weight], opset_imports={"": 21}, name=name)
    path = folder / f"{name}.onnx"
    ir.save(
        ir.Model(graph, ir_version=10), path, external_data=f"{name}.data", size_threshold_bytes=0 if in_file else 1000
    )
    both = [(Binding(f"{name}.{end}", "float32", ("tokens", len(scale))),) for end in ("x", "out")]
    return path, Contract(*both)


def test_equal_graphs_share_a_session_and_keep_their_own_vectors(tmp_path: Path) -> None:
    files = [
        scaled(tmp_path, "a", [1.0, 2.0]),
        scaled(tmp_path, "b", [3.0, 5.0]),
        scaled(tmp_path, "c", [7.0, 9.0], "Add"),
        scaled(tmp_path, "d", [1.0, 2.0, 3.0]),
    ]
    a, b, c, d = opened = open_subgraphs(files, CPU, 0, threads=1)
    assert a.session is b.session
    assert len({id(each.session) for each in opened}) == 3
    for each, scale, expected in ((a, 2, [1.0, 2.0]), (b, 2, [3.0, 5.0]), (c, 2, [8.0, 10.0]), (d, 3, [1.0, 2.0, 3.0])):
        x, out = torch.ones(1, scale), torch.zeros(1, scale)
        each.bind({each.inputs[0]: x, each.outputs[0]: out}).run()
        assert out.tolist() == [expected]


def test_graphs_with_their_own_vectors_of_floats_share_a_session(tmp_path: Path) -> None:
    """As those of joined biases; a single value may be a constant that onnxruntime reads when it opens the graph."""
    scales = {"a": [1.0, 2.0], "b": [3.0, 5.0], "c": [7.0], "d": [9.0]}
    files = [scaled(tmp_path, name, scale, in_file=False) for name, scale in scales.items()]
    opened = open_subgraphs(files, CPU, 0, threads=1)
    assert opened[0].session is opened[1].session
    assert len({id(each.session) for each in opened}) == 3
    for each, scale in zip(opened, scales.values(), strict=True):
        x, out = torch.ones(1, len(scale)), torch.zeros(1, len(scale))
        each.bind({each.inputs[0]: x, each.outputs[0]: out}).run()
        assert out.tolist() == [scale]
