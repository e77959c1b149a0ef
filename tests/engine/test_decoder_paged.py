"""The paged lowering: blocks in any order, sliding windows, and the subgraphs that a GPU runs between its kernels."""

from functools import partial
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors import safe_open

from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.decoder import Decoder as CutDecoder
from tandemrt.engines.validation.errors import InternalError
from tandemrt.export.passes.cut import cut
from tandemrt.runtime.device.backends.onnxruntime.executor import Executor
from tests.engine.decoding import SLIDING, VOCAB, Decoder, expected_logits, make_checkpoint, open_steps

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


@pytest.mark.parametrize(
    "case",
    ["llama biased with linear scaling", "qwen2 tied", "qwen3 tied with yarn", "qwen3 sliding in its second layer"],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_steps_one_after_the_other_are_the_whole(tmp_path: Path, case: str, dtype: str) -> None:
    """With the executor that serves a GPU, and the operators' CPU implementations."""
    model = make_checkpoint(case, tmp_path)
    whole = Decoder(tmp_path, "paged", batch=2, dtype=dtype, capacity=CAPACITY)
    steps = Decoder(tmp_path, "paged", 2, dtype, CAPACITY, open_engine=partial(open_steps, folder=tmp_path))
    rows = [sequence(85), sequence(85, 1)]
    expected = [expected_logits(model, row) for row in rows]
    picks = [[3, 0, 4], [1, 4, 2]]
    half = 0.02 * max(float(logits.abs().max()) for logits in expected)
    near, far = (2e-5, 1e-4) if dtype == "float32" else (half, half)
    for start, stop in ((0, 40), (40, 80), (80, 85)):
        tokens = [row[start:stop] for row in rows]
        own_logits = steps(tokens, [start, start], picks)
        torch.testing.assert_close(own_logits, whole(tokens, [start, start], picks), atol=near, rtol=0)
        for i in range(2):
            torch.testing.assert_close(
                own_logits[i], expected[i][[start + pick for pick in picks[i]]], atol=far, rtol=0
            )
    for name, tensor in whole.caches.items():
        torch.testing.assert_close(steps.caches[name], tensor, atol=near, rtol=0, msg=name)


EXPERTS = ["mixtral", "qwen3_moe with a dense layer"]
# Packed calls of four texts: those that have windows, of how many tokens, and which have runs, of how many.
PACKED = [
    ([0], 0, {0: 70, 2: 0, 1: 33}),
    ([0, 1], 3, {0: 31, 2: 65, 3: 1}),  # a prompt ends, and its window follows
    ([0, 1, 2], 1, {3: 63}),
    ([0, 1, 2, 3], 5, {2: 0}),
    ([3], 0, {3: 61}),
]


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("case", ["qwen2", "qwen3 tied with yarn", *SLIDING, *EXPERTS])
def test_windows_and_ragged_runs_of_one_call_equal_transformers(tmp_path: Path, case: str, in_steps: bool) -> None:
    model = make_checkpoint(case, tmp_path)
    open_engine = partial(open_steps, folder=tmp_path) if in_steps else None
    decode = Decoder(tmp_path, "paged", batch=4, capacity=CAPACITY, open_engine=open_engine)
    texts = [sequence(150, seed) for seed in range(4)]
    expected = [expected_logits(model, text) for text in texts]
    done = [0] * 4
    for rows, query, counts in PACKED:
        runs = [(text, done[text], done[text] + count) for text, count in counts.items()]
        for text, _, end in runs:
            done[text] = end
        windows = [slice(done[row], done[row] + query) for row in rows]
        logits = decode.packed(
            rows,
            [texts[row][window] for row, window in zip(rows, windows, strict=True)],
            [done[row] for row in rows],
            [(text, start, texts[text][start:end]) for text, start, end in runs],
            padding=len(runs),
        )
        wanted = [expected[row][window] for row, window in zip(rows, windows, strict=True)]
        wanted += [expected[text][start:end] for text, start, end in runs]
        torch.testing.assert_close(logits, torch.cat(wanted), atol=1e-4, rtol=0)
        for row in rows:
            done[row] += query


def test_prompts_of_one_call_are_the_same_prompts_one_by_one(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    texts = [sequence(length, length) for length in (64, 1, 33, 100)]
    together, alone = (Decoder(tmp_path, "paged", batch=4, capacity=CAPACITY) for _ in range(2))
    logits = together.packed([0], [[]], [0], [(row, 0, text) for row, text in enumerate(texts)], padding=2)
    one_by_one = [alone.packed([0], [[]], [0], [(row, 0, text)]) for row, text in enumerate(texts)]
    torch.testing.assert_close(logits, torch.cat(one_by_one), atol=2e-5, rtol=0)
    for name, tensor in together.caches.items():
        torch.testing.assert_close(tensor, alone.caches[name], atol=2e-5, rtol=0, msg=name)


def test_a_call_larger_than_the_buffers_between_steps_is_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    steps = Decoder(tmp_path, "paged", 2, open_engine=partial(open_steps, folder=tmp_path, tokens=10))
    assert steps([sequence(5)] * 2, [0, 0]).shape == (2, 5, VOCAB)
    with pytest.raises(InternalError, match=r"bind: a call of .*'tokens': 12.* is larger than .*'tokens': 10"):
        steps([sequence(6)] * 2, [0, 0])


def test_calls_of_as_many_tokens_share_the_steps_that_see_nothing_else(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    decode = Decoder(tmp_path, "paged", batch=4, capacity=CAPACITY, open_engine=partial(open_steps, folder=tmp_path))
    steps, text = decode.engine, sequence(30)
    assert isinstance(steps, Executor)
    bound, seen = [], []
    bind = steps.bind
    steps.bind = lambda tensors: bound.append(bind(tensors)) or bound[-1]  # type: ignore[method-assign, func-returns-value]
    for rows, runs in (([0], [(0, 0, text)]), ([1], [(1, 0, text[:10]), (2, 0, text[:20])]), ([3], [(3, 0, text[:9])])):
        decode.packed(rows, [[]], [0], runs)
        seen.append({id(call) for call in bound[-1]._calls})
    others = LAYERS + 3  # attention, what reads token ids, what picks rows and what makes logits
    assert len(seen[0] & seen[1]) == len(seen[0]) - others > 0
    assert not seen[0] & seen[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, CutDecoder]:
    folder, cut_up = tmp_path_factory.mktemp("qwen3"), []
    make_checkpoint("qwen3", folder)

    def open_engine(model: ir.Model, contract: Contract) -> Executor:
        engine = open_steps(model, contract, folder)
        cut_up.append(cut(model)[1])
        return engine

    whole = Decoder(folder, "paged", batch=1, open_engine=open_engine).path
    return folder, whole, cut_up[0]


def files_of(cut_up: CutDecoder) -> list[str]:
    """The constants first, then the subgraphs in order."""
    return [subgraph.file for subgraph in cut_up.subgraphs]


def test_every_subgraph_passes_the_onnx_checker_and_declares_what_it_takes_and_gives(built) -> None:
    folder, whole, cut_up = built
    for file in (whole.name, *files_of(cut_up)):
        onnx.checker.check_model(folder / file, full_check=True)
    declared = []
    for file in files_of(cut_up)[1:]:
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


def test_a_subgraph_computes_nothing_on_the_host_and_holds_nothing_but_matmuls_and_norms(built) -> None:
    """A captured graph would repeat what the host once computed from a shape."""
    folder, _, cut_up = built
    allowed = {"Gather", "RMSNormalization", "FusedMatMul", "SkipSimplifiedLayerNormalization", "Concat"}
    allowed |= {"Unsqueeze", "Expand", "GatherElements"}  # the rows that get logits
    for file in files_of(cut_up)[1:]:
        nodes = onnx.load(folder / file, load_external_data=False).graph.node
        assert {node.op_type for node in nodes} <= allowed
        assert len(nodes) <= 9


def test_every_weight_is_in_some_subgraph_and_none_is_copied(built) -> None:
    folder, _, cut_up = built
    places: dict[int, int] = {}
    for file in files_of(cut_up):
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
    logits = Decoder(tmp_path, "paged", batch=1)([tokens], [0])[0]
    torch.testing.assert_close(logits, expected_logits(model, tokens), atol=1e-4, rtol=0)


def test_half_precision_stays_near_float32_over_blocks(tmp_path: Path) -> None:
    model = make_checkpoint("mistral sliding", tmp_path)
    decode = Decoder(tmp_path, "paged", batch=1, dtype="float16", capacity=CAPACITY)
    tokens = sequence(100)
    expected = expected_logits(model, tokens)
    logits = torch.cat([decode([tokens[:70]], [0])[0], decode([tokens[70:]], [70])[0]])
    torch.testing.assert_close(logits, expected, atol=0.02 * expected.abs().max().item(), rtol=0)
