"""The kernels of linear_attention: the bits of a token do not depend on windows, chunks, slots or neighbours.

Prompts of Gated DeltaNet in 16-bit types are processed in chunks of 64 tokens: their bits are those of any cut at block
ends, and not those of windows.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.operators.launch import Call, Context
from tests.engine.implementation_cases import KINDS, to_torch
from tests.engine.recurrent_cases import HISTORY, WINDOW, Sizes
from tests.gpu.here import compute_capabilities

SIZES = {
    "by head": Sizes(2, 4, 128, 128),
    "by channel": Sizes(2, 2, 64, 64, per_channel=True),
    "of OLMo": Sizes(2, 2, 96, 192),
    "of Qwen3-Next": Sizes(2, 4, 128, 128, order="by key head"),
    "of three narrow values to a key": Sizes(2, 6, 128, 64),
    "of Mamba-2": Sizes(2, 8, 128, 80, order="as Mamba-2"),
    "of Falcon-H1": Sizes(1, 4, 256, 64, order="as Mamba-2"),
}
TOKENS = 3 * BLOCK_SIZE + 8


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder: Path = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, names=["linear_attention"])
    return Context(torch.device("cuda", 0), folder)


class Texts:
    """Texts in slots on the GPU."""

    def __init__(self, context: Context, sizes: Sizes, dtype: str, slots: int) -> None:
        self.context, self.sizes = context, sizes
        drawn = sizes.weights(np.random.default_rng(1), KINDS[dtype])
        self.weights = {name: to_torch(each).cuda() for name, each in drawn.items()}
        self.dtype = getattr(torch, dtype)
        # What the last owners of the slots left must not matter.
        self.state = torch.full(sizes.state(slots), torch.nan, device="cuda")
        self.recent = torch.full((slots, HISTORY, sizes.parts.width), torch.nan, dtype=self.dtype, device="cuda")
        self.covered = torch.zeros(slots, dtype=torch.int64, device="cuda")

    def bind(
        self,
        mixed: torch.Tensor,
        index: torch.Tensor,
        runs: list[tuple[int, int, int]],
        *,
        run_covered: torch.Tensor | None = None,
    ) -> tuple[Call, torch.Tensor]:
        """Bind windows of the first slots at ``index``, and ``runs`` (slot, tokens before, tokens); return the output.

        ``mixed``: tokens of the windows and of the runs; in a call without windows, also padding. ``run_covered``: the
        tokens that the states of the runs cover, if not ``covered``.
        """
        counts, batch = [count for *_, count in runs], len(index)
        padding = 0 if batch else len(mixed) - sum(counts)
        integers = {"dtype": torch.int64, "device": "cuda"}
        slots = torch.tensor([slot for slot, *_ in runs], **integers)
        out = torch.full((len(mixed), self.sizes.value_heads * self.sizes.value_dim), 77.0, device="cuda")
        tensors = {
            "projected": mixed,
            "state": self.state,
            "recent": self.recent,
            **self.weights,
            "state_index": self.covered[:batch].clone(),
            "write_index": index,
            "commit_index": index,
            "prompt_rows": torch.tensor(np.repeat(range(len(runs)), counts).tolist() + [-1] * padding).int().cuda(),
            "prompt_starts": torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device="cuda"),
            "prompt_index": torch.tensor([start for _, start, _ in runs], **integers),
            "prompt_slots": slots,
            "prompt_state_index": self.covered[slots] if run_covered is None else run_covered,
            "out": out.to(self.dtype),
        }
        self.bound = tensors
        attributes = self.sizes.attributes
        return launcher("linear_attention", self.context)(tensors, attributes, self.context), tensors["out"]

    def prompt(self, mixed: torch.Tensor, *runs: tuple[int, int, int]) -> torch.Tensor:
        call, out = self.bind(mixed, self.covered[:0], list(runs))
        call.run()
        for slot, start, count in runs:
            self.covered[slot] = start + count - 1
        return out

    def windows(self, mixed: torch.Tensor, index: list[int]) -> torch.Tensor:
        at = torch.tensor(index, device="cuda")
        call, out = self.bind(mixed, at, [])
        call.run()
        self.covered[: len(at)] = at
        return out


def in_chunks(sizes: Sizes, dtype: str) -> bool:
    parts = sizes.parts
    return dtype != "float32" and parts.has_update and parts.key_dim == 128 and parts.decays == parts.value_heads


def assert_equal(out: torch.Tensor, wanted: torch.Tensor, *, exact: bool = True) -> None:
    if exact:
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    else:
        torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)


@pytest.fixture(params=[(kind, dtype) for kind in SIZES for dtype in KINDS], ids=" in ".join)
def text(request: pytest.FixtureRequest, context: Context) -> tuple[Sizes, str, torch.Tensor, torch.Tensor]:
    """Sizes, dtype, the tokens of a text, and its outputs: the whole text as one prompt."""
    kind, dtype = request.param
    sizes = SIZES[kind]
    drawn = torch.randn(TOKENS, sizes.parts.pitch, generator=torch.Generator("cuda").manual_seed(2), device="cuda")
    tokens = drawn.to(getattr(torch, dtype))
    out = Texts(context, sizes, dtype, 1).prompt(tokens, (0, 0, TOKENS))
    assert out.isfinite().all()
    return sizes, dtype, tokens, out


def test_any_chunks_and_padding_give_the_bits_of_one_prompt(context: Context, text: tuple) -> None:
    sizes, dtype, tokens, wanted = text
    texts, start = Texts(context, sizes, dtype, 3), 0
    cuts = (BLOCK_SIZE, 2 * BLOCK_SIZE, 8) if in_chunks(sizes, dtype) else (1, 2, 17, 1, 1, 18, 160)
    for count in cuts:
        noise = torch.randn_like(tokens[:9])
        mixed = torch.cat([noise[:5], tokens[start : start + count], noise[:2]])
        out = texts.prompt(mixed, (0, 3 * start, 5), (2, start, count))
        assert_equal(out[5 : 5 + count], wanted[start : start + count])
        assert (out[5 + count :] == 77).all()
        texts.covered[0] = 0
        start += count


def test_any_windows_with_rejected_drafts_give_the_bits_of_the_prompt(context: Context, text: tuple) -> None:
    sizes, dtype, tokens, wanted = text
    texts = Texts(context, sizes, dtype, 3)
    texts.prompt(tokens[:10], (1, 0, 10))
    start = 10
    for query, kept in ((1, 1), (5, 5), (5, 2), (5, 0), (1, 1), (3, 3), (2, 1), (5, 5), (4, 4), (5, 4)):
        window = torch.randn(3, query, sizes.parts.pitch, device="cuda").to(tokens.dtype)
        window[1, :kept] = tokens[start : start + kept]
        out = texts.windows(window.view(3 * query, -1), [0, start, 7]).view(3, query, -1)
        assert_equal(out[1, :kept], wanted[start : start + kept], exact=not in_chunks(sizes, dtype))
        start += kept


def test_a_run_and_a_window_of_its_text_share_a_call(context: Context, text: tuple) -> None:
    sizes, dtype, tokens, wanted = text
    texts = Texts(context, sizes, dtype, 1)
    texts.prompt(tokens[:6], (0, 0, 6))
    run_covered = texts.covered.clone()
    texts.covered[0] = 19  # what the run leaves
    mixed, index = torch.cat([tokens[20:25], tokens[6:20]]), torch.tensor([20], device="cuda")
    call, out = texts.bind(mixed, index, [(0, 6, 14)], run_covered=run_covered)
    call.run()
    assert_equal(torch.cat([out[5:], out[:5]]), wanted[6:25], exact=not in_chunks(sizes, dtype))


def test_a_captured_run_serves_later_positions(context: Context) -> None:
    sizes = SIZES["by head"]
    tokens = torch.randn(30, sizes.parts.pitch, device="cuda").bfloat16()
    wanted = Texts(context, sizes, "bfloat16", 1).prompt(tokens, (0, 0, 30))
    texts = Texts(context, sizes, "bfloat16", 1)
    texts.prompt(tokens[:5], (0, 0, 5))
    mixed, index = tokens[5:10].clone(), torch.tensor([5], device="cuda")
    call, out = texts.bind(mixed, index, [])
    call.run()
    texts.bound["state_index"].fill_(5)  # as the cache does after a run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    graph.replay()
    assert_equal(out, wanted[5:10], exact=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_chunks_are_close_to_one_token_after_the_other(context: Context, dtype: str) -> None:
    sizes, count = SIZES["of Qwen3-Next"], 1000
    tokens = torch.randn(count, sizes.parts.pitch, device="cuda").to(getattr(torch, dtype))
    texts, exact = Texts(context, sizes, dtype, 1), Texts(context, sizes, "float32", 1)
    exact.weights["conv_weight"] = texts.weights["conv_weight"].float()
    out, wanted = texts.prompt(tokens, (0, 0, count)), exact.prompt(tokens.float(), (0, 0, count))
    error = (out.float() - wanted).norm() / wanted.norm()
    assert error < (3e-3 if dtype == "bfloat16" else 1e-3)
    torch.testing.assert_close(texts.state, exact.state, rtol=5e-3, atol=5e-3 * float(exact.state.abs().max()))


def test_shapes_without_kernels_are_refused_by_name(context: Context) -> None:
    texts = Texts(context, Sizes(1, 1, 40, 16), "bfloat16", 1)
    with pytest.raises(ValueError, match=r"state: key sizes of .* are needed, got \[1, 1, 40, 16\]"):
        texts.prompt(torch.zeros(WINDOW, texts.sizes.parts.pitch, dtype=torch.bfloat16, device="cuda"), (0, 0, WINDOW))
