"""The exported file itself: its bindings, its operators, where its weights lie, and what it costs to make."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.validation.errors import InternalError
from tandemrt.export.graph.builder import DTYPES, GraphBuilder, save_model
from tandemrt.export.model.attention import bounded
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.passes.pipelines import PIPELINES
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tests.engine.decoding import Decoder, make_checkpoint
from tests.families.cases import FAMILIES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("qwen3 tied with yarn", folder)
    return folder


# Those of a Qwen3 in the parser of TensorRT 8.6.
BASIC_OPERATORS = {
    "Add",
    "Cast",
    "Concat",
    "Div",
    "Expand",
    "Gather",
    "GatherND",
    "LessOrEqual",
    "MatMul",
    "Mul",
    "Range",
    "ReduceMean",
    "Reshape",
    "ScatterElements",
    "Shape",
    "Sigmoid",
    "Slice",
    "Softmax",
    "Sqrt",
    "Squeeze",
    "Sub",
    "Transpose",
    "Unsqueeze",
    "Where",
}


def export(folder: Path, **options) -> onnx.ModelProto:
    checkpoint = Checkpoint.open(folder)
    options = {"dtype": "float32", "capacity": 40, "lowering": "length"} | options
    save_model(build_decoder(ModelSpec.from_hf(checkpoint.config), checkpoint, **options), folder / "graph.onnx")
    return onnx.load(folder / "graph.onnx", load_external_data=False)


@pytest.mark.parametrize("lowering", ["length", "mask"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype_and_lowering_passes_the_onnx_checker(folder, dtype, lowering):
    model = export(folder, dtype=dtype, lowering=lowering)
    onnx.checker.check_model(folder / "graph.onnx", full_check=True)
    assert (model.ir_version, [(o.domain, o.version) for o in model.opset_import]) == (11, [("", 24)])
    assert {node.domain for node in model.graph.node} == {""}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_basic_lowering_is_written_in_the_operators_that_every_tensorrt_has(folder, dtype):
    """No rotary table is left to compute on the GPU, and norms, softmax and scores are float32."""
    checkpoint = Checkpoint.open(folder)
    spec = ModelSpec.from_hf(checkpoint.config)
    model = build_decoder(spec, checkpoint, dtype=dtype, capacity=40, lowering="basic")
    PIPELINES["basic"](model)
    save_model(model, folder / "graph.onnx")
    onnx.checker.check_model(folder / "graph.onnx", full_check=True)
    written = onnx.load(folder / "graph.onnx", load_external_data=False)
    assert (written.ir_version, [(o.domain, o.version) for o in written.opset_import]) == (8, [("", 17)])
    operators = Counter(node.op_type for node in written.graph.node)
    assert set(operators) <= BASIC_OPERATORS
    assert not any(node.attribute for node in written.graph.node if node.op_type == "Shape")  # 8.6 ignores them
    assert operators["Softmax"] == spec.layers
    assert operators["ScatterElements"] == 2 * spec.layers
    inferred = onnx.shape_inference.infer_shapes(written, strict_mode=True)
    dtypes = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    wide = [n for n in written.graph.node if n.op_type in ("Softmax", "Sqrt", "ReduceMean")]
    assert {dtypes[node.output[0]] for node in wide} == {onnx.TensorProto.FLOAT}


def test_the_graph_is_written_in_the_operators_that_engines_have_natively(folder):
    for lowering in ("length", "mask"):
        operators = [node.op_type for node in export(folder, lowering=lowering).graph.node]
        layers = 2
        assert operators.count("Attention") == layers
        assert operators.count("RotaryEmbedding") == operators.count("TensorScatter") == 2 * layers
        assert operators.count("RMSNormalization") == 4 * layers + 1


def test_every_weight_is_a_place_in_the_safetensors_file_and_nothing_else(folder):
    model = export(folder, weights_dir="weights/target")
    read = set()
    with safe_open(folder / "model.safetensors", framework="np") as stored:
        content = (folder / "model.safetensors").read_bytes()
        for tensor in model.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                assert len(tensor.raw_data) <= 64
                continue
            entry = {item.key: item.value for item in tensor.external_data}
            assert entry["location"] == "weights/target/model.safetensors"
            begin = int(entry["offset"])
            assert content[begin : begin + int(entry["length"])] == stored.get_tensor(tensor.name).tobytes()
            read.add(tensor.name)
        assert read == set(stored.keys())


def test_a_weight_stored_in_another_dtype_is_cast_right_after_the_initializer(folder):
    graph = export(folder, dtype="float16").graph
    external = {t.name for t in graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    readers = {node.op_type for node in graph.node if external & set(node.input)}
    assert readers == {"Cast", "Gather"}  # the embedding gathers its rows first and casts those


def test_the_cache_is_never_copied(folder, capfd):
    """onnxruntime warns when TensorScatter copies the cache; on the engine it does not, without IO binding it does."""
    decode = Decoder(folder, "length", batch=2)
    call, _ = decode.bind(torch.zeros(2, 5, dtype=torch.int64), [0, 7], torch.zeros(2, 1, dtype=torch.int64))
    options = onnxruntime.RunOptions()
    options.log_severity_level = 2  # the engine hides warnings
    capfd.readouterr()
    decode.engine.session.run_with_iobinding(call._binding, options)
    assert "TensorScatter" not in capfd.readouterr().err

    feed = {"token_ids": torch.zeros(2, 5, dtype=torch.int64), "write_index": torch.zeros(2, dtype=torch.int64)}
    feed |= {"score_rows": torch.zeros(2, 1, dtype=torch.int64)} | decode.caches
    decode.engine.session.run(["logits"], {name: t.numpy() for name, t in feed.items()}, options)
    assert "copying past_cache to present_cache" in capfd.readouterr().err


def test_exporting_the_dimensions_of_an_8b_model_stays_within_its_limits():
    """The benchmark command fails beyond 10 s, 1 GB of memory or a graph file of 2 MB."""
    command = [sys.executable, "-m", "tools.bench.export", "--capacity", "32768"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16.1 GB" in done.stdout


def test_the_builder_names_the_node_whose_inputs_do_not_fit():
    b = GraphBuilder("g")
    left, right = b.input(Binding("left", "float32", (2, 3))), b.input(Binding("right", "float32", (4, 5)))
    with b.scope("layers.0"), pytest.raises(InternalError, match=r"layers\.0/MatMul does not fit.*left.*right"):
        b.op("MatMul", left, right)


def test_the_builder_types_nodes_that_are_alike_alike_and_others_by_their_constants():
    b = GraphBuilder("g")
    x = b.input(Binding("x", "float32", ("batch", 6)))
    shapes = [b.op("Reshape", x, b.constant(sizes)).shape for sizes in ([-1, 2, 3], [-1, 2, 3], [-1, 3, 2])]
    assert [shape[1:] for shape in shapes] == [(2, 3), (2, 3), (3, 2)]
    picked = [b.op("Transpose", x, perm=order).shape for order in ([0, 1], [1, 0])]
    assert [list(map(str, shape)) for shape in picked] == [["batch", "6"], ["6", "batch"]]


@pytest.mark.parametrize(("dtype", "computed"), [("bfloat16", "float32"), ("float16", "float16")])
def test_bounded_values_are_clipped_in_a_type_that_onnxruntime_clips_on_a_gpu(dtype, computed):
    spec = ModelSpec.from_hf(FAMILIES["olmo"]().to_dict())
    b = GraphBuilder("g")
    result = bounded(b, b.input(Binding("x", dtype, ("batch", 8))), spec, dtype)
    (clip,) = (node for node in b.model().graph if node.op_type == "Clip")
    assert [value.dtype for value in (*clip.inputs, result)] == [*(DTYPES[computed],) * 3, DTYPES[dtype]]


def test_the_builder_refuses_an_output_that_breaks_the_contract():
    contract = Contract((Binding("x", "float32", ("batch", 3)),), (Binding("y", "float32", ("batch", 4)),))
    b = GraphBuilder("g")
    with pytest.raises(InternalError, match=r"output should be y float32\[batch, 4\]"):
        b.output(contract["y"], b.op("Neg", b.input(contract["x"])))
