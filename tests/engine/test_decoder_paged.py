"""The paged lowering: blocks in any order, sliding windows, and the pieces that a GPU runs between its kernels."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open

from tandemrt.engines import segments
from tandemrt.engines.manifest import Segments
from tandemrt.export.passes.cut import cut
from tandemrt.plugins.reference import window_attention
from tandemrt.plugins.reference.swiglu import swiglu
from tests.engine.decoding import SLIDING, VOCAB, Decoder, expected_logits, make_checkpoint

CAPACITY = 170  # three blocks, the last one not full
LAYERS = 2


def sequence(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("case", ["qwen2", "qwen3 tied with yarn", *SLIDING])
def test_rows_that_span_blocks_equal_transformers(tmp_path: Path, case: str) -> None:
    """Chunks and windows that cross the border of a block, in a batch whose rows stand at different places."""
    model = make_checkpoint(case, tmp_path)
    decode = Decoder(tmp_path, "paged", batch=2, capacity=CAPACITY)
    rows = [sequence(160), sequence(160, 1)]
    expected = [expected_logits(model, row) for row in rows]
    done = [0, 0]
    for steps in [(50, 37), (50, 50), (7, 7), (1, 1), (45, 45)]:
        size = max(steps)
        logits = decode([row[start : start + size] for row, start in zip(rows, done, strict=True)], done)
        for i, step in enumerate(steps):
            torch.testing.assert_close(logits[i, :step], expected[i][done[i] : done[i] + step], atol=1e-4, rtol=0)
            done[i] += step


class Pieces:
    """The pieces of a cut decoder on onnxruntime, with the definitions of the operators between them."""

    def __init__(self, folder: Path, cut_up: Segments) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        files = (cut_up.constants, *cut_up.files)
        constants, *self.sessions = (
            onnxruntime.InferenceSession(folder / file, options, providers=["CPUExecutionProvider"]) for file in files
        )
        self.values = dict(
            zip((output.name for output in constants.get_outputs()), constants.run(None, {}), strict=True)
        )
        self.cut_up = cut_up

    def __call__(self, caches: dict[str, np.ndarray], **inputs: np.ndarray) -> np.ndarray:
        """The logits; ``caches`` are updated."""
        values = self.values | inputs
        for session in self.sessions:
            names = [output.name for output in session.get_outputs()]
            feeds = {given.name: values[given.name] for given in session.get_inputs()}
            values |= dict(zip(names, session.run(None, feeds), strict=True))
            for name in names:
                kind, _, layer = name.partition(".")
                if kind == "qkv":
                    values[segments.mixed(int(layer))] = self._attend(int(layer), values, caches)
                elif kind == "gate_up":
                    values[segments.activated(int(layer))] = swiglu(values[name])
        return values["logits"]

    def _attend(self, layer: int, values: dict[str, np.ndarray], caches: dict[str, np.ndarray]) -> np.ndarray:
        key, value = f"past_key.{layer}", f"past_value.{layer}"
        mixed, caches[key], caches[value] = window_attention(
            values[segments.qkv(layer)],
            caches[key],
            caches[value],
            values["block_table"],
            values["write_index"],
            values[segments.COSINE],
            values[segments.SINE],
            values.get(segments.q_norm(layer)),
            values.get(segments.k_norm(layer)),
            heads=self.cut_up.heads,
            kv_heads=self.cut_up.kv_heads,
            scale=self.cut_up.scale,
            epsilon=self.cut_up.epsilon,
            sliding_window=self.cut_up.sliding_window[layer],
        )
        return mixed


@pytest.mark.parametrize(
    "case",
    ["llama biased with linear scaling", "qwen2 tied", "qwen3 tied with yarn", "qwen3 sliding in its second layer"],
)
def test_the_pieces_with_the_operators_between_them_are_the_whole(tmp_path: Path, case: str) -> None:
    model = make_checkpoint(case, tmp_path)
    decode = Decoder(tmp_path, "paged", batch=2, capacity=CAPACITY)
    pieces = Pieces(tmp_path, cut(decode.path, tmp_path))
    caches = {name: tensor.numpy().copy() for name, tensor in decode.caches.items()}
    rows = [sequence(85), sequence(85, 1)]
    expected = [expected_logits(model, row) for row in rows]
    picks = np.array([[3, 0, 4], [1, 4, 2]])
    for start, stop in ((0, 40), (40, 80), (80, 85)):
        tokens = [row[start:stop] for row in rows]
        found = pieces(
            caches,
            token_ids=np.array(tokens),
            write_index=np.array([start, start]),
            score_rows=picks,
            block_table=decode.table.numpy(),
        )
        whole = decode(tokens, [start, start], picks.tolist())
        np.testing.assert_allclose(found, whole.numpy(), atol=2e-5)
        for i in range(2):
            np.testing.assert_allclose(found[i], expected[i][start + picks[i]].numpy(), atol=1e-4)
    for name, tensor in decode.caches.items():
        np.testing.assert_allclose(caches[name], tensor.numpy(), atol=2e-5, err_msg=name)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Segments]:
    folder = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3", folder)
    whole = Decoder(folder, "paged", batch=1).path
    return folder, whole, cut(whole, folder)


def test_every_piece_passes_the_onnx_checker_and_declares_what_it_takes_and_gives(built) -> None:
    folder, whole, cut_up = built
    for file in (whole.name, cut_up.constants, *cut_up.files):
        onnx.checker.check_model(folder / file, full_check=True)
    declared = []
    for file in cut_up.files:
        graph = onnx.load(folder / file, load_external_data=False).graph
        declared.append(tuple([value.name for value in values] for values in (graph.input, graph.output)))
        for value in (*graph.input, *graph.output):
            assert all(dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim), value.name
    assert declared == [
        (["token_ids"], ["hidden.0", "qkv.0"]),
        (["hidden.0", "mixed.0"], ["residual.0", "gate_up.0"]),
        (["residual.0", "activated.0"], ["hidden.1", "qkv.1"]),
        (["score_rows", "hidden.1", "mixed.1"], ["residual.1", "gate_up.1"]),
        (["residual.1", "activated.1"], ["logits"]),
    ]


def test_a_piece_computes_nothing_on_the_host_and_holds_nothing_but_products_and_norms(built) -> None:
    """A captured graph would repeat what the host once computed from a shape."""
    folder, _, cut_up = built
    allowed = {"Gather", "RMSNormalization", "FusedMatMul", "SkipSimplifiedLayerNormalization", "Concat"}
    allowed |= {"Unsqueeze", "Expand", "GatherElements"}  # the rows that get logits
    for file in cut_up.files:
        nodes = onnx.load(folder / file, load_external_data=False).graph.node
        assert {node.op_type for node in nodes} <= allowed
        assert len(nodes) <= 9


def test_every_weight_is_in_some_piece_and_none_is_copied(built) -> None:
    folder, _, cut_up = built
    places: dict[int, int] = {}
    for file in (cut_up.constants, *cut_up.files):
        for tensor in onnx.load(folder / file, load_external_data=False).graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                assert len(tensor.raw_data) <= 64
                continue
            entry = {item.key: item.value for item in tensor.external_data}
            assert entry["location"] == "model.safetensors"
            places[int(entry["offset"])] = int(entry["length"])
    with safe_open(folder / "model.safetensors", framework="np") as stored:
        assert sum(places.values()) == sum(stored.get_tensor(name).nbytes for name in stored.keys())  # noqa: SIM118


def test_gate_and_up_are_one_place_in_a_file_that_holds_them_side_by_side(built) -> None:
    _, whole, _ = built
    graph = onnx.load(whole, load_external_data=False).graph
    packed = [tensor.name for tensor in graph.initializer if "+" in tensor.name]
    assert packed == [
        f"model.layers.{i}.mlp.gate_proj.weight+model.layers.{i}.mlp.up_proj.weight" for i in range(LAYERS)
    ]
    assert sum(node.op_type == "Concat" for node in graph.node) == LAYERS  # query, key and value


def test_a_checkpoint_that_scatters_its_tensors_over_files_packs_them_all_the_same(tmp_path: Path) -> None:
    model = make_checkpoint("qwen2", tmp_path, max_shard_size="16KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    tokens = sequence(12)
    found = Decoder(tmp_path, "paged", batch=1)([tokens], [0])[0]
    torch.testing.assert_close(found, expected_logits(model, tokens), atol=1e-4, rtol=0)


def test_half_precision_stays_near_float32_over_blocks(tmp_path: Path) -> None:
    model = make_checkpoint("mistral sliding", tmp_path)
    decode = Decoder(tmp_path, "paged", batch=1, dtype="float16", capacity=CAPACITY)
    tokens = sequence(100)
    expected = expected_logits(model, tokens)
    found = torch.cat([decode([tokens[:70]], [0])[0], decode([tokens[70:]], [70])[0]])
    torch.testing.assert_close(found, expected, atol=0.02 * expected.abs().max().item(), rtol=0)
