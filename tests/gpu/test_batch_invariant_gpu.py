"""What ``backend.batch_invariant`` promises on a CUDA device: a token's bits are the same in any call."""

import itertools
from pathlib import Path

import pytest
import torch

from tandemrt.engines.contract.gpus import FLOAT8_FROM
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.kernels import attention_prompts, experts, float8_matmul, linear, low_bit_matmul
from tandemrt.plugins.kernels.attention import launch
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.kernels.float8_ordered import OrderedMatmul
from tandemrt.plugins.operators.constants import SILU_EXPERTS
from tandemrt.plugins.operators.launch import Context
from tandemrt.runtime.caches.kv_cache import no_prompts
from tests.engine.attention_cases import BFLOAT16, SCALES, attributes, case, case_in_float8
from tests.engine.decoding import make_checkpoint
from tests.engine.implementation_cases import LOW_BIT
from tests.gpu.attention import bind, on_device
from tests.gpu.here import CAPABILITY, compute_capabilities, needs_float8, skipped_without_equal_bits
from tests.gpu.low_bit import low_bit
from tests.gpu.rounds import check_invisible, paged, texts, tiny
from tests.makers import VOCAB, tiny_checkpoint, tiny_tokenizer, write_recipe

FLOAT8 = torch.float8_e4m3fn
ROWS = (1, 2, 5, 8, 16, 17, 64, 65, 80, 320, 1000)
MOST = 17  # tokens of the largest window
FEW = 4  # and of another bundle's: two warps share the rows of one token
HEADS, KV_HEADS = 32, 4
HEAD_DIMS = [64, 128, 256, 512]
IN_FLOAT8 = [64, 128]
DTYPES = [torch.bfloat16, torch.float16]
OF_EXPERTS = {"per_token": 3, "normalized": 1, **SILU_EXPERTS}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder = tmp_path_factory.mktemp("kernels")
    dtypes = ["bfloat16", "float16"]
    compile_kernels(compute_capabilities(), folder, names=["attention"], dtypes=dtypes, head_dims=HEAD_DIMS)
    if CAPABILITY >= FLOAT8_FROM:
        compile_kernels(compute_capabilities(), folder, names=["attention_float8"], dtypes=dtypes, head_dims=IN_FLOAT8)
    names = ["experts", "float8", "int4", "int8", "float4", "k_quants", "linear", "swiglu"]
    compile_kernels(compute_capabilities(), folder, names=names)
    sizes = {"window+1": MOST, "query": 2048}
    return Context(torch.device("cuda", 0), folder, sizes=sizes, batch_invariant=True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize(
    ("width", "inner"), [(8, 2048), (24, 64), (512, 4096), (4096, 1040), (4096, 1088), (40_000, 512)]
)
def test_a_row_of_a_matmul_has_the_same_bits_among_any_others(
    context: Context, width: int, inner: int, dtype: torch.dtype
) -> None:
    x, weight = random(ROWS[-1], inner).to(dtype), random(width, inner).to(dtype)
    outputs = []
    for rows in ROWS:
        out = torch.full((rows, width), torch.nan, dtype=dtype, device="cuda")
        with skipped_without_equal_bits():
            linear.launch({"x": x[:rows], "weight": weight, "out": out}, {}, context).run()
        outputs.append(out)
    assert all(torch.equal(each, outputs[-1][: len(each)]) for each in outputs)
    torch.testing.assert_close(outputs[-1].double(), x.double() @ weight.double().T, atol=0.02 * inner**0.5, rtol=0.02)


@needs_float8
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("width", "inner"), [(48, 208), (512, 4096), (6000, 4112), (4096, 14336)])
def test_a_row_of_a_matmul_in_float8_has_the_same_bits_among_any_others(
    context: Context, width: int, inner: int, scaled: bool
) -> None:
    x, weight = random(ROWS[-1], inner).to(FLOAT8), random(width, inner).to(FLOAT8)
    of_rows, of_outputs = random(ROWS[-1], 1).float().abs(), random(width).float().abs()
    outputs = []
    for rows in ROWS:
        out = torch.full((rows, width), torch.nan, dtype=torch.bfloat16, device="cuda")
        tensors = {"quantized": x[:rows], "weight": weight.view(torch.uint8), "out": out}
        scales = {"scales": of_rows[:rows], "weight_scales": of_outputs}
        with skipped_without_equal_bits():
            if scaled:
                float8_matmul.launch_scaled(tensors | scales, {}, context).run()
            else:
                float8_matmul.launch(tensors, {}, context).run()
        outputs.append(out)
    assert all(torch.equal(each, outputs[-1][: len(each)]) for each in outputs)


@pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "inner"), [(48, 208), (512, 4096), (6000, 4112), (4096, 14336), (28_672, 4096)])
def test_our_kernel_for_few_rows_in_float8_adds_as_cublaslt_does_for_many(
    context: Context, width: int, inner: int, dtype: torch.dtype
) -> None:
    """Every run of many, because a race between warps would show in some of them."""
    x, weight = random(320, inner).to(FLOAT8), random(width, inner).to(FLOAT8)
    many = torch.empty(320, width, dtype=dtype, device="cuda")
    linear.BatchInvariantMatmul(context, x, weight, many).run()
    for rows in (1, 7, 8, 9, 16):
        out = torch.empty(rows, width, dtype=dtype, device="cuda")
        call = OrderedMatmul(context, x[:rows], weight, out)
        for _ in range(20):
            out.fill_(torch.nan)
            call.run()
            assert torch.equal(out, many[:rows])


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [264, 4096])
@pytest.mark.parametrize("operator", LOW_BIT)
def test_a_row_of_a_matmul_in_4_or_8_bits_has_the_same_bits_among_any_others(
    context: Context, operator: str, width: int, dtype: torch.dtype, prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of windows, and rows of prompts; both in the last call."""
    inner = 1024
    monkeypatch.setattr(low_bit_matmul, "_SCRATCH", 2 * inner * 1536)  # parts of 1,536 outputs
    tensors, sizes = low_bit(operator, width, inner, rows=ROWS[-1], dtype=dtype)

    def multiplied(rows: int, of_prompts: int) -> torch.Tensor:
        out = torch.full((rows, width), torch.nan, dtype=dtype, device="cuda")
        inputs = tensors | {"x": tensors["x"][:rows], "out": out} | prompt_rows(of_prompts)
        with skipped_without_equal_bits():
            launcher(operator, context)(inputs, sizes, context).run()
        return out

    outputs = [multiplied(rows, rows * prompts) for rows in ROWS]
    assert all(torch.equal(each, outputs[-1][: len(each)]) for each in outputs)
    both = multiplied(903, 900)
    part = slice(3, 903) if prompts else slice(0, 3)
    assert torch.equal(both[part], outputs[-1][part])


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_a_token_goes_through_experts_with_the_same_bits_among_any_others(
    context: Context, dtype: torch.dtype, prompts: bool
) -> None:
    """Tokens of windows, and tokens of prompts; both in the last call."""
    hidden, width, count = 256, 136, 16
    weights = {"gate_up": random(2 * count * width, hidden) / 16, "down": random(count * hidden, width) / 12}
    x, logits = random(ROWS[-1], hidden), random(ROWS[-1], count)

    def through_experts(rows: int, of_prompts: int) -> torch.Tensor:
        mixed = torch.full((rows, hidden), torch.nan, dtype=dtype, device="cuda")
        tensors = {name: each.to(dtype) for name, each in weights.items()} | {"mixed": mixed}
        tensors |= {"x": x[:rows].to(dtype), "router_logits": logits[:rows].to(dtype)} | prompt_rows(of_prompts)
        experts.launch(tensors, OF_EXPERTS, context).run()
        return mixed

    outputs = [through_experts(rows, rows * prompts) for rows in ROWS]
    assert all(torch.equal(each, outputs[-1][: len(each)]) for each in outputs)
    both = through_experts(903, 900)
    part = slice(3, 903) if prompts else slice(0, 3)
    assert torch.equal(both[part], outputs[-1][part])


@pytest.mark.parametrize("sliding_window", [0, 300])
@pytest.mark.parametrize(
    ("head_dim", "cached"),
    [
        *((size, False) for size in (64, 128, 512)),
        *(pytest.param(size, True, marks=needs_float8) for size in IN_FLOAT8),
    ],
)
def test_a_prompt_attends_with_the_same_bits_among_others_and_in_chunks(
    context: Context, cached: bool, head_dim: int, sliding_window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a float8 cache are converted for a few runs at a time."""
    runs = [(0, 200), (63, 1), (64, 64), (129, 190), (700, 17), (0, 3), (1000, 150)]
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": head_dim}
    make = case_in_float8 if cached else case
    tensors = make([7], 0, runs, max_blocks=20, dtype=BFLOAT16, **sizes)
    attention = attributes(**sizes, **(SCALES if cached else {}), sliding_window=sliding_window)
    monkeypatch.setattr(attention_prompts, "_MAX_CONVERTED_BYTES", 3 * 20 * 2 * 64 * head_dim * 2 * 2)

    def attend(on_gpu: dict[str, torch.Tensor | None], run: int, first: int, end: int) -> torch.Tensor:
        """The tokens ``first`` to ``end`` of one run alone."""
        at, index, table = (on_gpu[name] for name in ("prompt_starts", "prompt_index", "prompt_table"))
        start = int(at[run])
        alone = on_gpu | {
            "qkv": on_gpu["qkv"][start + first : start + end].contiguous(),
            "prompt_rows": torch.zeros(end - first, dtype=torch.int32, device="cuda"),
            "prompt_starts": torch.tensor([0, end - first], dtype=torch.int32, device="cuda"),
            "prompt_index": index[run : run + 1] + first,
            "prompt_table": table[run : run + 1].contiguous(),
        }
        call, mixed, _ = bind(context, alone, attention)
        call.run()
        return mixed

    call, together, _ = bind(context, on_device(tensors), attention)
    call.run()
    chunked = on_device(tensors)
    for run, (_, count) in enumerate(runs):
        cuts = [0, count] if run % 2 else [0, count // 3, count // 2, count]
        parts = [attend(chunked, run, first, end) for first, end in itertools.pairwise(cuts) if first < end]
        start = int(tensors["prompt_starts"][run])
        assert torch.equal(torch.cat(parts), together[start : start + count])


@pytest.mark.parametrize("sliding_window", [0, 100])
@pytest.mark.parametrize(("most", "query"), [(MOST, 2), (MOST, 5), (MOST, MOST), (FEW, FEW), (2, 2)])
@pytest.mark.parametrize("normed", [False, True])  # and with sinks
@pytest.mark.parametrize(
    ("head_dim", "in_float8"),
    [*((size, False) for size in HEAD_DIMS), *(pytest.param(size, True, marks=needs_float8) for size in IN_FLOAT8)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_attends_with_the_same_bits_alone_and_in_any_window(
    context: Context,
    most: int,
    query: int,
    sliding_window: int,
    normed: bool,
    head_dim: int,
    dtype: torch.dtype,
    in_float8: bool,
) -> None:
    """All rows at once, a part of them and one alone: a row's keys are shared by 1, 2 and 4 thread blocks."""
    context = Context(context.device, context.kernels, sizes={**context.sizes, "window+1": most}, batch_invariant=True)
    lengths = torch.tensor([0, 1, 59, 62, 63, 64, 126, 250, 500, 1000], device="cuda").repeat(4)
    batch, blocks = len(lengths), 20
    shared = {
        "cosine": random(blocks * 64, head_dim // 2).cos().to(dtype),
        "sine": random(blocks * 64, head_dim // 2).sin().to(dtype),
        "block_table": 1 + torch.randperm(batch * blocks, device="cuda").to(torch.int32).view(batch, blocks),
    }
    cached = FLOAT8 if in_float8 else dtype
    caches = [random(1 + batch * blocks, KV_HEADS, 64, head_dim).to(cached) for _ in range(2)]
    qkv = random(batch, query, (HEADS + 2 * KV_HEADS) * head_dim).to(dtype)
    norms = {"q_norm": random(head_dim).to(dtype), "k_norm": random(head_dim).flip(0).to(dtype)} if normed else {}
    norms |= {"sinks": random(HEADS).float()} if normed else {}

    def attend(
        rows: slice, tokens: slice, index: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        part = qkv[rows, tokens]
        table = shared["block_table"][rows].contiguous()
        mixed = torch.full(
            (part.shape[0] * part.shape[1], HEADS * head_dim), torch.nan, dtype=part.dtype, device="cuda"
        )
        tensors = {**shared, "block_table": table, **no_prompts(table), "write_index": index, "mixed": mixed}
        tensors |= norms | {"qkv": part.flatten(0, 1).contiguous(), "key_cache": key_cache, "value_cache": value_cache}
        sizes = {
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "scale": head_dim**-0.5,
            "sliding_window": sliding_window,
        } | ({"key_scale": 0.75, "value_scale": 1.25} if in_float8 else {})
        launch(tensors, sizes, context).run()
        return mixed.view(*part.shape[:2], -1)

    everybody, all_tokens = slice(None), slice(None)
    at_once, one_by_one, alone = ([cache.clone() for cache in caches] for _ in range(3))
    windows = attend(everybody, all_tokens, lengths, *at_once)
    singles = [attend(everybody, slice(j, j + 1), lengths + j, *one_by_one) for j in range(query)]
    assert torch.equal(windows, torch.cat(singles, dim=1))
    as_bytes = [[cache.view(torch.uint8) for cache in each] for each in (at_once, one_by_one)]
    assert all(torch.equal(one, other) for one, other in zip(*as_bytes, strict=True))
    for rows in (slice(3, 4), slice(9, 10), slice(12, 32)):
        outputs = attend(rows, all_tokens, lengths[rows], *alone)
        assert torch.equal(outputs, windows[rows])


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("bfloat16", None),
        ("float32", None),
        ("int4", None),
        ("int8", None),
        pytest.param("bfloat16", "float8_e4m3", marks=needs_float8),
    ],
)
def test_speculation_and_batch_mates_change_no_text(tmp_path: Path, dtype: str, kv_dtype: str | None) -> None:
    """The random models have nearly flat distributions."""
    backend = paged() + "\nbatch_invariant = true"
    bundle = tiny(tmp_path / "tiny", backend=backend, dtype=dtype, kv_dtype=kv_dtype)
    check_invisible(bundle, texts(12, words=lambda i: i % 7))


def test_speculation_changes_no_text_of_experts_with_a_router_of_groups(tmp_path: Path) -> None:
    target = tmp_path / "target"
    make_checkpoint("glm4_moe", target, sizes={"vocab_size": VOCAB, "head_dim": 32, "max_position_embeddings": 256})
    tiny_tokenizer(target)
    draft, recipe = tiny_checkpoint(tmp_path / "draft", layers=1, seed=1, head_dim=32), tmp_path / "r.toml"
    backend = paged() + "\nbatch_invariant = true"
    write_recipe(recipe, target=target, draft=draft, backend=backend, dtype="bfloat16", prefill_chunk=64)
    check_invisible(build(Recipe.load(recipe), tmp_path / "bundle").folder, texts(12, words=lambda i: i % 7))


def prompt_rows(count: int) -> dict[str, torch.Tensor]:
    """The input that makes the last ``count`` rows those of prompts."""
    return {"prompt_rows": torch.zeros(count, dtype=torch.int32, device="cuda")}


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)
