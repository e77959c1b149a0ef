"""Attention of new tokens over a paged cache: the definition against transformers, the function body against it."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3Config
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins import functions
from tandemrt.plugins.kernels.attention import AttentionLauncher
from tandemrt.plugins.kernels.attention_plan import KEYS, MAX_SPLITS, Plan
from tandemrt.plugins.kernels.attention_prompts import seen_blocks
from tandemrt.plugins.kernels.attention_wide_plan import WidePlan
from tandemrt.plugins.kernels.attention_workspace import AttentionWorkspace
from tandemrt.plugins.operators.constants import DOMAIN
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.reference import window_attention
from tests.engine.attention_cases import NAMES, assert_close, attributes, case, expected, tolerance

ELEMENTS = {np.float32: ir.DataType.FLOAT, np.float16: ir.DataType.FLOAT16}
RUNS = [(0, 70), (63, 2), (5, 0), (130, 33)]
PROCESSORS, SHARED = 132, 227 * 1024  # of an H200


def transformer(kind):
    """An attention layer of transformers in float32, its rotary embedding and its mask; the output is not projected."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sliding = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0} if kind == "sliding" else {}
    config = LlamaConfig(**sizes) if kind == "llama" else Qwen3Config(**sizes, num_hidden_layers=1, **sliding)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = (LlamaAttention if kind == "llama" else Qwen3Attention)(config, 0)
    rotary = (LlamaRotaryEmbedding if kind == "llama" else Qwen3RotaryEmbedding)(config)
    mask = create_sliding_window_causal_mask if kind == "sliding" else create_causal_mask
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.copy_(torch.eye(128) if "o_proj" in name else weight + torch.randn_like(weight) / 8)
    return layer, rotary, lambda x: mask(config, x, None, None)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "sliding"])
def test_the_definition_is_the_attention_of_transformers(kind):
    """Three ragged rows in chunks of 5, 3 and 1 tokens, each through its own table, against whole texts."""
    layer, rotary, mask = transformer(kind)
    lengths, block_size = [19, 4, 11], 8
    hidden = [torch.randn(1, length, 128) for length in lengths]
    with torch.no_grad():
        whole = [layer(x, rotary(x, torch.arange(x.shape[1])[None]), mask(x))[0][0].numpy() for x in hidden]
        qkv = [torch.cat([p(x[0]) for p in (layer.q_proj, layer.k_proj, layer.v_proj)], -1).numpy() for x in hidden]
        cosine, sine = (table[0, :, :16].numpy() for table in rotary(hidden[0], torch.arange(24)[None]))
    norms = [] if kind == "llama" else [norm.weight.detach().numpy() for norm in (layer.q_norm, layer.k_norm)]
    table = np.array([[5, 2, 9], [1, 7, 8], [4, 3, 6]], np.int32)
    keys = values = np.full((10, 2, block_size, 32), np.nan, np.float32)
    attention = attributes(head_dim=32, sliding_window=7 if kind == "sliding" else 0)
    for row, length in enumerate(lengths):
        done = 0
        for chunk in [5, 3, *[1] * length]:
            chunk = min(chunk, length - done)
            if not chunk:
                break
            new = qkv[row][done : done + chunk]
            mixed, keys, values = window_attention(
                new,
                keys,
                values,
                table[row : row + 1],
                [done],
                [],
                [0],
                [],
                table[:0],
                cosine,
                sine,
                *norms,
                **attention,
            )
            np.testing.assert_allclose(mixed, whole[row][done : done + chunk], rtol=2e-5, atol=2e-5)
            done += chunk


@pytest.mark.parametrize("sliding_window", [0, 1, 70])
def test_rows_in_one_call_are_the_rows_one_by_one(sliding_window):
    tensors, attention = case([3, 0, 64, 100], 5), attributes(sliding_window=sliding_window)
    together = expected(tensors, attention)
    for row in (0, 2, 3):
        one = {n: tensors[n][row : row + 1] for n in ("block_table", "write_index")}
        one["qkv"] = tensors["qkv"][5 * row : 5 * row + 5]
        np.testing.assert_array_equal(expected(tensors | one, attention)[0], together[0][5 * row : 5 * row + 5])


def test_a_window_is_its_tokens_one_after_the_other():
    tensors, attention = case([62, 9], 4, norm=True), attributes(sliding_window=33)
    mixed, *caches = expected(tensors, attention)
    for j in range(4):
        one = {"qkv": tensors["qkv"][j::4], "write_index": tensors["write_index"] + j}
        single, tensors["key_cache"], tensors["value_cache"] = expected(tensors | one, attention)
        np.testing.assert_allclose(single, mixed[j::4], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(tensors["key_cache"], caches[0])


@pytest.mark.parametrize("sliding_window", [0, 70])
def test_runs_of_prompts_in_one_call_are_windows_one_by_one(sliding_window):
    tensors, attention = case([64, 9], 3, RUNS, padding=4, norm=True), attributes(sliding_window=sliding_window)
    mixed, *caches = expected(tensors, attention)
    assert not mixed[-4:].any()
    alone = tensors | {"prompt_rows": [], "prompt_starts": [0], "prompt_index": [], "prompt_table": np.empty((0, 1))}
    row = {n: tensors[n] for n in ("block_table", "write_index")} | {"qkv": tensors["qkv"][:6]}
    outputs, alone["key_cache"], alone["value_cache"] = expected(alone | row, attention)
    np.testing.assert_array_equal(outputs, mixed[:6])
    for run, (first, end) in enumerate(pairwise(6 + tensors["prompt_starts"])):
        row = {"block_table": tensors["prompt_table"][[run]], "write_index": tensors["prompt_index"][[run]]}
        if end > first:
            outputs, alone["key_cache"], alone["value_cache"] = expected(
                alone | row | {"qkv": tensors["qkv"][first:end]}, attention
            )
            np.testing.assert_array_equal(outputs, mixed[first:end])
    for outputs, wanted in zip((alone["key_cache"], alone["value_cache"]), caches, strict=True):
        np.testing.assert_array_equal(outputs, wanted)


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    query=st.integers(0, 5),
    runs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=4),
    padding=st.integers(0, 5),
    sliding_window=st.sampled_from([0, 1, 9]),
)
def test_the_function_body_equals_the_definition_whatever_a_call_is_packed_of(
    session, lengths, query, runs, padding, sliding_window
):
    if not query * len(lengths) + sum(new for _, new in runs):
        query = 1
    tensors = case(lengths, query, runs, padding if runs else 0, head_dim=32, block_size=16)
    attention = attributes(head_dim=32, sliding_window=sliding_window)
    feed = {name: tensors[name] for name in NAMES if tensors[name] is not None}
    outputs = session(np.float32, False, attention).run(["mixed", "key", "value"], feed)
    assert_close(outputs, expected(tensors, attention), tensors, tolerance(np.float32))


def test_a_window_follows_a_prompt_run_of_the_same_text(session):
    """The last part of a prompt and the following window are one call."""
    tensors, attention = case([90], 3, [(20, 70)], head_dim=32), attributes(head_dim=32)
    tensors["block_table"] = tensors["prompt_table"]
    feed = {name: tensors[name] for name in NAMES if tensors[name] is not None}
    outputs = session(np.float32, False, attention).run(["mixed", "key", "value"], feed)
    wanted = expected(tensors, attention)
    assert_close(outputs, wanted, tensors, tolerance(np.float32))
    whole = tensors | {"qkv": np.roll(tensors["qkv"], -3, axis=0), "block_table": tensors["prompt_table"]}
    whole |= {"prompt_rows": [], "prompt_starts": [0], "prompt_index": [], "prompt_table": np.empty((0, 1))}
    whole["write_index"] = tensors["prompt_index"]
    np.testing.assert_allclose(np.roll(expected(whole, attention)[0], 3, axis=0), wanted[0], rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def session():
    """Sessions by dtype, norm and attributes, each opened once."""
    opened = {}

    def get(dtype, norm, attention):
        key = (dtype, norm, *attention.values())
        if key not in opened:
            opened[key] = onnxruntime.InferenceSession(
                _model(dtype, norm, attention), providers=["CPUExecutionProvider"]
            )
        return opened[key]

    return get


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("sliding_window", [0, 9])
@pytest.mark.parametrize("lengths", [[0, 5, 64, 130], [63], [1, 127]])
@pytest.mark.parametrize("query", [1, 2, 5, 16])
def test_the_function_body_equals_the_definition(session, dtype, norm, sliding_window, lengths, query):
    """Unused entries are NaN. With a cache bound to both input and output it is updated in place."""
    tensors = case(lengths, query, head_dim=32, norm=norm, dtype=dtype)
    attention = attributes(head_dim=32, sliding_window=sliding_window)
    opened, wanted = session(dtype, norm, attention), expected(tensors, attention)
    feed = {name: tensors[name] for name in NAMES if tensors[name] is not None}
    assert_close(opened.run(["mixed", "key", "value"], feed), wanted, tensors, tolerance(dtype))

    bound = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in feed.items()}
    binding = opened.io_binding()
    for name, value in bound.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("mixed")
    binding.bind_ortvalue_output("key", bound["key_cache"])
    binding.bind_ortvalue_output("value", bound["value_cache"])
    opened.run_with_iobinding(binding)
    outputs = [binding.copy_outputs_to_cpu()[0], bound["key_cache"].numpy(), bound["value_cache"].numpy()]
    assert_close(outputs, wanted, tensors, tolerance(dtype))


def test_the_function_body_takes_one_block_of_any_size_per_row(session):
    tensors, attention = case([70, 3], 3, head_dim=32, block_size=101, max_blocks=1), attributes(head_dim=32)
    feed = {name: tensors[name] for name in NAMES if tensors[name] is not None}
    outputs = session(np.float32, False, attention).run(["mixed", "key", "value"], feed)
    assert_close(outputs, expected(tensors, attention), tensors, tolerance(np.float32))


def test_free_rows_write_to_the_scratch_block_and_nowhere_else(session):
    tensors, attention = case([0, 65, 0], 5, head_dim=32), attributes(head_dim=32)
    feed = {name: tensors[name] for name in NAMES if tensors[name] is not None}
    _, key, _ = session(np.float32, False, attention).run(["mixed", "key", "value"], feed)
    written = {block for block in range(len(key)) if not np.array_equal(key[block], feed["key_cache"][block], True)}
    assert written == {0, tensors["block_table"][1, 1]}


@settings(deadline=None)
@given(
    batch=st.integers(1, 256),
    query=st.integers(1, 2048),
    kv_heads=st.sampled_from([1, 2, 8, 32]),
    group=st.sampled_from([1, 2, 4, 7, 8]),
    head_dim=st.sampled_from([32, 64, 128]),
    capacity=st.integers(1, 131072),
)
def test_a_plan_covers_every_row_and_fits_the_device(batch, query, kv_heads, group, head_dim, capacity):
    sizes = {"batch": batch, "query": query, "heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": head_dim}
    plan = Plan.of(**sizes, capacity=capacity, sm_count=PROCESSORS)
    assert plan.tiles * plan.rows >= query * group > (plan.tiles - 1) * plan.rows
    assert 1 <= plan.splits <= min(MAX_SPLITS, -(-capacity // KEYS))
    assert plan.grid == (plan.tiles * plan.splits, kv_heads, batch)
    assert plan.shared <= SHARED
    assert plan.shared >= max(4 * 16 * (head_dim + 8) * 4, plan.splits * plan.rows * 4)  # what is merged in its place


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=70),
    padding=st.integers(1, 127),
    group=st.sampled_from([1, 2, 4, 7, 8]),
)
def test_a_plan_of_runs_has_a_tile_for_every_token_however_they_are_shared_out(lengths, padding, group):
    sizes = {"heads": 2 * group, "kv_heads": 2, "head_dim": 128, "capacity": 4096, "sm_count": PROCESSORS}
    plan = Plan.of_runs(runs=len(lengths), tokens=sum(lengths) + padding, **sizes)
    assert plan.tiles >= sum(-(-length * group // plan.rows) for length in lengths)
    assert plan.grid == (plan.tiles * plan.splits, 2, 1)


@given(
    written=st.integers(0, 5000), tokens=st.integers(1, 700), sliding_window=st.integers(0, 900), more=st.integers(0, 9)
)
def test_the_blocks_of_a_run_cover_its_sliding_window_in_whole_tiles(written, tokens, sliding_window, more):
    """Positions as the kernel has them, which begins at the tile that the window of the run's first token begins in."""
    tile, block = 128, 64
    max_blocks = 2 * (-(-(written + tokens) // tile) + more)
    blocks = seen_blocks(max_blocks, tokens, sliding_window, block)
    begin = max(0, written - sliding_window + 1) // tile * tile if sliding_window else 0
    end = -(-(written + tokens) // tile) * tile
    assert end - begin <= blocks * block <= max_blocks * block
    assert blocks * block % tile == 0
    assert not sliding_window or blocks * block < sliding_window + tokens + 2 * tile


def test_few_rows_share_the_processors_and_many_do_not_split():
    sizes = {"query": 5, "heads": 32, "kv_heads": 8, "head_dim": 128, "capacity": 2048, "sm_count": PROCESSORS}
    assert [Plan.of(batch=batch, **sizes).splits for batch in (1, 4, 8, 64)] == [8, 4, 2, 1]


def test_few_rows_of_many_keys_are_shared_by_more_blocks():
    sizes = {"query": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "sm_count": PROCESSORS}
    assert [Plan.of(batch=1, capacity=capacity, **sizes).splits for capacity in (320, 4096, 8192)] == [5, 8, 16]


@given(
    batch=st.integers(1, 128),
    largest=st.integers(1, 17),
    query=st.integers(1, 17),
    group=st.sampled_from([1, 2, 4, 7, 8]),
    head_dim=st.sampled_from([32, 64, 128]),
    cached=st.sampled_from([1, 2]),
)
def test_a_batch_invariant_plan_has_the_same_rows_for_every_call(batch, largest, query, group, head_dim, cached):
    sizes = {"heads": 8 * group, "kv_heads": 8, "head_dim": head_dim, "sm_count": PROCESSORS, "clusters": True}
    sizes |= {"largest_query": largest, "cached": cached}
    full = Plan.batch_invariant(batch=128, query=largest, **sizes)
    plan = Plan.batch_invariant(batch=batch, query=min(query, largest), **sizes)
    assert plan.rows == full.rows
    assert plan.splits in (1, 2, 4)
    assert plan.tiles * plan.rows >= min(query, largest) * group > (plan.tiles - 1) * plan.rows
    results = 2 if plan.splits == 2 else 1  # which a block shares with the others
    assert results * 4 * 64 * (head_dim + 8) <= plan.shared <= SHARED


def test_few_rows_of_a_batch_invariant_plan_share_the_processors():
    sizes = {"query": 5, "largest_query": 5, "heads": 32, "kv_heads": 8, "head_dim": 128, "sm_count": PROCESSORS}
    plans = [Plan.batch_invariant(batch=batch, clusters=True, **sizes) for batch in (1, 4, 8, 16, 32, 64)]
    assert [plan.splits for plan in plans] == [4, 4, 2, 2, 1, 1]


def test_a_batch_invariant_plan_has_no_larger_call_than_the_largest():
    sizes = {"largest_query": 4, "heads": 32, "kv_heads": 8, "head_dim": 128, "sm_count": PROCESSORS, "clusters": True}
    with pytest.raises(ValueError, match=r"query: 1 to 4 tokens per row are needed, got 5"):
        Plan.batch_invariant(batch=1, query=5, **sizes)


def test_a_batch_invariant_call_takes_no_other_cut():
    tensors = {n: v if v is None else torch.from_numpy(v) for n, v in case([70, 3], 3, dtype=np.float16).items()}
    context = Context(torch.device("cpu"), Path(), sizes={"batch": 2, "window+1": 3}, batch_invariant=True)
    context.get_or_create(("module", "attention"), lambda: SimpleNamespace(sm_count=PROCESSORS, architecture=90))
    tensors["mixed"] = torch.zeros(6, 256, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"splits: a batch-invariant plan has its own, None is needed, got 2"):
        AttentionLauncher(context, *tensors.values(), **attributes(), splits=2)


@pytest.mark.parametrize(("splits", "cluster"), [(1, 1), (2, 2), (8, 8), (9, 1)])
def test_blocks_of_one_cluster_need_no_workspace(splits, cluster):
    sizes = {"query": 5, "heads": 32, "kv_heads": 8, "head_dim": 128, "capacity": 2048, "sm_count": PROCESSORS}
    plan = Plan.of(batch=1, clusters=True, splits=splits, **sizes)
    assert plan.cluster == cluster
    assert plan.grid[0] % cluster == 0
    assert (plan.parts > 0) == (plan.shared_rows > 0) == (splits > cluster)


@pytest.mark.parametrize(
    ("shared_memory", "windows", "runs"),
    [(232_448, (32, 2), (64, 2)), (166_912, (32, 1), (64, 1)), (101_376, (16, 1), (16, 1))],
)
def test_tiles_of_heads_of_512_fit_the_shared_memory(shared_memory, windows, runs):
    of_windows = WidePlan.of_windows(batch=1, lines=40, kv_heads=2, sm_count=PROCESSORS, shared_memory=shared_memory)
    of_runs = WidePlan.of_runs(runs=3, lines=4000, kv_heads=2, shared_memory=shared_memory)
    assert [(plan.rows, plan.buffers) for plan in (of_windows, of_runs)] == [windows, runs]
    assert max(of_windows.shared, of_runs.shared) < shared_memory
    assert (of_windows.splits, of_runs.splits) == (8, 1)


def test_a_device_without_memory_for_a_tile_of_heads_of_512_is_rejected():
    with pytest.raises(
        BackendUnavailable, match=r"512 values need 85568 bytes .* the device has 65536; choose onnxruntime-cpu"
    ):
        WidePlan.of_runs(runs=1, lines=1, kv_heads=1, shared_memory=65_536)


def test_a_workspace_grows_and_is_shared():
    sizes = {"query": 5, "heads": 32, "kv_heads": 8, "head_dim": 128, "capacity": 2048, "sm_count": PROCESSORS}
    workspace = AttentionWorkspace("cpu")
    plans = [Plan.of(batch=batch, **sizes) for batch in (4, 1, 64, 8)]
    parts = [workspace.parts(plan) for plan in plans]
    assert all(each.hold(plan) for each, plan in zip(parts, plans, strict=True))
    assert parts[0] is parts[1] is parts[2]
    assert not parts[-1].tickets.any()


def test_prepared_queries_have_a_shared_workspace_that_grows():
    workspace = AttentionWorkspace("cpu")
    few, many, some = (workspace.queries(tokens, 4, 32, torch.float16) for tokens in (5, 100, 60))
    assert few.shape == (5, 4, 32)
    assert some.data_ptr() == many.data_ptr() != few.data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(6, 500)}, "qkv: a contiguous"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "block_table: a contiguous torch.int32"),
        ({"mixed": torch.zeros(256, 6).T}, "mixed: a contiguous"),
        ({"q_norm": torch.ones(64)}, "both or neither"),
        (
            {"prompt_rows": torch.zeros(1, dtype=torch.int32)},
            "windows of equal length .* 2 rows, 1 prompt tok",
        ),
        ({"prompt_rows": torch.zeros(2, dtype=torch.int32)}, "windows of equal length .* 2 prompt tokens and 0 runs"),
        ({"prompt_starts": torch.zeros(2, dtype=torch.int32)}, r"prompt_starts: a contiguous torch.int32\[1\]"),
        ({"key_cache": torch.zeros(5, 2, 48, 64), "value_cache": torch.zeros(5, 2, 48, 64)}, "multiple of 64"),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_shapes_that_do_not_match_are_refused_by_name(change, message):
    tensors = {n: v if v is None else torch.from_numpy(v) for n, v in case([70, 3], 3).items()}
    tensors = {**tensors, "mixed": torch.zeros(6, 256)} | change
    with pytest.raises(ValueError, match=message):
        AttentionLauncher(Context(torch.device("cpu")), *tensors.values(), **attributes())


def _model(dtype, norm, attention):
    """A graph of one node that carries the function."""
    element = ELEMENTS[dtype]
    ranks = {name: len(SCHEMAS["window_attention"][name].shape) for name in NAMES}
    kinds = {"int32": ir.DataType.INT32, "int64": ir.DataType.INT64}
    types = {name: kinds.get(SCHEMAS["window_attention"][name].dtype, element) for name in NAMES}
    present = ("q_norm", "k_norm") if norm else ()
    names = [name for name in NAMES if name in present or name not in SCHEMAS["window_attention"].optional]

    def value(name, rank):
        dims = [f"{name}_{axis}" for axis in range(rank)]
        return onnx.helper.make_tensor_value_info(name, int(types.get(name, element)), dims)

    node = onnx.helper.make_node("window_attention", names, ["mixed", "key", "value"], domain=DOMAIN, **attention)
    outputs = [value("mixed", 2), value("key", 4), value("value", 4)]
    graph = onnx.helper.make_graph([node], "attention", [value(name, ranks[name]) for name in names], outputs)
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in (("", functions.OPSET), (DOMAIN, 1))]
    body = ir.to_proto(functions.window_attention(present))
    model = onnx.helper.make_model(graph, functions=[body], opset_imports=imports, ir_version=11)
    return model.SerializeToString()
