"""A target over two GPUs serves requests as one GPU does."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.runtime.workers import ranks
from tandemrt.runtime.workers.ranks import RankProcesses
from tests.engine.decoding import make_checkpoint
from tests.engine.draft_kinds import KINDS, SIZES, Target
from tests.engine.test_quantized_checkpoints import FLOAT8, INT4, OTHERS
from tests.engine.test_quantized_experts import write as write_experts
from tests.engine.test_tensor_parallel import OF_EXPERTS, write_quantized
from tests.gpu.here import TURN, needs_float8
from tests.gpu.rounds import MIXED, REPEATING, Requests, drive, output_of, paged, texts
from tests.makers import VOCAB, on_a_gpu, tiny_checkpoint, tiny_hybrid, tiny_latent, tiny_tokenizer, write_recipe
from tests.waiting import eventually
from tools.models.quantized_weights import WeightFormat, quantize_matmuls, write_quantization_config

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PROMPT = list(range(40, 80))
PROMPTS = ["the and the", '{"a":', "hello world " * 4, "x"]
NGRAM = 'kind = "ngram"\nnum_draft_tokens = 4\nngram_min = 1'
INVARIANT = "batch_invariant = true"


def bundle_of(folder: Path, *, dtype: str = "bfloat16", backend: str = "", ranks: int = 2, **how: Any) -> Path:
    folder.mkdir(exist_ok=True)
    recipe = write_recipe(
        folder / "r.toml",
        backend=f"{paged()}\ntensor_parallel = {ranks}\n{backend}",
        dtype=dtype,
        **{"prefill_chunk": 64, "length": 256, **how},
    )
    return build(Recipe.load(recipe), folder / "bundle").folder


def without_drafts(requests: Requests) -> Requests:
    return [(prompt, {**params, "num_draft_tokens": 0}) for prompt, params in requests]


def logprobs(llm: LLM) -> dict[int, float]:
    """Return the largest log probabilities after PROMPT, by token."""
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=20, logprobs_mode="raw", ignore_eos=True)
    tokens = llm.generate(PROMPT, params).logprobs
    assert tokens is not None
    return dict(tokens[0].top)


def transformers_logprobs(target: Path) -> dict[int, float]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        return dict(enumerate(torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, -1], -1).tolist()))


def assert_near(actual: dict[int, float], expected: dict[int, float], near: float) -> None:
    both = actual.keys() & expected.keys()
    assert len(both) > 15
    assert max(abs(actual[token] - expected[token]) for token in both) < near


def check_invisible(llm: LLM, requests: Requests) -> None:
    """Assert that drafts are accepted and change no text, eagerly and from graphs."""
    TURN.take()
    plain = output_of(drive(llm, without_drafts(requests)))
    for _ in range(3):
        assert output_of(drive(llm, requests)) == plain
    assert output_of(drive(llm, without_drafts(requests))) == plain
    assert sum(llm.metrics.accepted) > 0


@pytest.fixture(autouse=True)
def in_turn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ranks start in several tests at a time, but run in one."""
    wait = RankProcesses.wait_until_opened

    def wait_until_opened(processes: RankProcesses) -> None:
        wait(processes)
        TURN.take()

    monkeypatch.setattr(RankProcesses, "wait_until_opened", wait_until_opened)
    yield
    TURN.end()


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def bundle(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Path:
    folder, sizes = tmp_path_factory.mktemp(request.param), {"hidden": 64, "head_dim": 32, "seed": 1, "max_length": 512}
    target = tiny_checkpoint(folder / "target", layers=4, **sizes)
    draft = tiny_checkpoint(folder / "draft", layers=1, **sizes)
    return bundle_of(folder, dtype=request.param, target=target, draft=draft, prefill_chunk=256, length=512)


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle) as opened:
        yield opened


def test_logits_of_two_ranks_are_those_of_transformers(llm: LLM, bundle: Path) -> None:
    near = 1e-3 if llm.bundle.engine("target").dtype == "float32" else 0.06
    assert_near(logprobs(llm), transformers_logprobs(bundle.parent / "target"), near)


def test_drafts_change_no_text_and_cached_beginnings_neither(llm: LLM) -> None:
    if llm.bundle.engine("target").batch_invariant:
        check_invisible(llm, MIXED)
    shared = "one beginning of all prompts that fills a block of sixty-four tokens, and then some "
    params = [SamplingParams(seed=seed, temperature=0.8, max_tokens=24, ignore_eos=True) for seed in range(3)]
    first = [llm.generate(shared + str(at), each) for at, each in enumerate(params)]
    again = llm.generate([shared + str(at) for at in range(3)], params)
    assert [output.num_cached_tokens for output in first] == [0, 64, 64]
    assert [output.num_cached_tokens for output in again] == [64, 64, 64]
    if llm.bundle.engine("target").batch_invariant:
        assert [output.token_ids for output in again] == [output.token_ids for output in first]


@pytest.mark.parametrize("bundle", ["bfloat16"], indirect=True)
def test_preemption_changes_no_text(bundle: Path, llm: LLM) -> None:
    requests = texts(12, words=lambda i: 100 + i)
    with LLM(bundle, cache_tokens=576) as small:  # nine blocks of 64 tokens: four texts grow to twelve
        assert output_of(drive(small, requests)) == output_of(drive(llm, requests))
        assert small.metrics.preemptions > 0


@pytest.mark.parametrize("bundle", ["bfloat16"], indirect=True)
@pytest.mark.parametrize(
    ("end", "why"), [("SIGKILL", "rank 1 was ended by SIGKILL"), ("SIGSTOP", "rank 1 has not answered for")]
)
def test_a_rank_that_dies_or_hangs_ends_every_request_and_is_named(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, end: str, why: str
) -> None:
    with LLM(bundle) as llm:
        monkeypatch.setattr(ranks, "ANSWER_S", 2.0)
        process = llm.loop.target.engines["target"]._processes._processes[0]  # type: ignore[attr-defined]
        items: list[Any] = []
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        requests = [llm.submit(prompt, params, items.append) for prompt in PROMPTS]
        assert eventually(lambda: len(items) > 3)
        os.kill(process.pid, signal.Signals[end])
        assert eventually(lambda: sum(item.output is not None for item in items) == len(requests))
        ended = [item.output for item in items if item.output is not None]
        assert {output.finish_reason for output in ended} == {"error"}
        assert all(why in str(output.error) for output in ended)
    assert not process.is_alive()


@pytest.mark.parametrize("kind", ["ngram", *KINDS])
def test_drafts_of_every_kind_change_no_text(tmp_path: Path, kind: str) -> None:
    target, draft, among = tiny_checkpoint(tmp_path / "target", **SIZES), tmp_path / "draft", {}
    drafting = NGRAM
    if kind in KINDS:
        KINDS[kind].save(draft, Target(target))
        drafting = f'kind = "{kind}"\ncheckpoint = "{draft}"\nnum_draft_tokens = {KINDS[kind].window}'
        known = KINDS[kind].known(draft)  # a bias makes the target choose what the draft knows
        among = {"logit_bias": dict.fromkeys(known, 30.0), "ignore_eos": True} if known else {}
        target = draft if KINDS[kind].with_target else target
    requests = [*MIXED, *(("among " * (7 * i + 1), {"seed": i, "max_tokens": 40, **among}) for i in range(4))]
    requests += [] if kind in KINDS else REPEATING
    with LLM(bundle_of(tmp_path, target=target, drafting=drafting), overlap=kind in KINDS) as llm:  # as below
        check_invisible(llm, requests)


def quantized(form: WeightFormat) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        target = tiny_checkpoint(folder, hidden=256, head_dim=64, layers=2, seed=1, max_length=512)
        save_file(quantize_matmuls(load_file(target / "model.safetensors"), form), target / "model.safetensors")
        write_quantization_config(target, form)
        return target

    return make


def stored(case: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write_quantized(folder, OTHERS[case])
        return folder

    return make


def stored_experts(case: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder.mkdir()
        write_experts(folder, case, **OF_EXPERTS)
        return tiny_tokenizer(folder)

    return make


def family(name: str, **sizes: Any) -> Callable[[Path], Path]:
    of_text = {"vocab_size": VOCAB, "max_position_embeddings": 512, "eos_token_id": 263, "bos_token_id": None}

    def make(folder: Path) -> Path:
        make_checkpoint(name, folder, sizes=of_text | sizes)
        return tiny_tokenizer(folder)

    return make


def hybrid(kind: str, **sizes: int) -> Callable[[Path], Path]:
    return lambda folder: tiny_hybrid(folder, kind, seed=1, **on_a_gpu(kind) | sizes)


UNQUANTIZED: dict[str, Callable[[Path], Path]] = {
    "experts": family("qwen3_moe", moe_intermediate_size=32, num_experts=8, head_dim=32),
    "delta nets": hybrid("delta net", linear_num_key_heads=4, linear_num_value_heads=8),
    "Mamba-2": hybrid("mamba", hidden=128, num_attention_heads=4, mamba_n_heads=16),
    # the norm needs the outputs of all ranks
    "Mamba-2, one group": hybrid("mamba", hidden=128, num_attention_heads=4, mamba_n_heads=16, mamba_n_groups=1),
    "short convolutions": hybrid("convolution", hidden=64, num_attention_heads=2),
    "latent attention": tiny_latent,
    "latent attention and experts": lambda folder: tiny_latent(folder, "deepseek_v3"),
    "Kimi delta attention": family("kimi_linear", moe_intermediate_size=32),
}
QUANTIZED: dict[str, Callable[[Path], Path]] = {
    "weights in float8": quantized(WeightFormat.FP8),
    "weights in 4 bits": quantized(WeightFormat.INT4),
    "weights in 8 bits": stored("gptq, 8 bits"),
    "weights in 4-bit floats": stored("modelopt, NVFP4"),
    "experts in float8": stored_experts(FLOAT8["compressed-tensors, channel, inputs by token"]),
    "experts in 4 bits": stored_experts(INT4["gptq_v2, zero points"]),
    "experts in 8 bits": stored_experts(OTHERS["modelopt, W8A16"]),
    "experts in 4-bit floats": stored_experts(OTHERS["quark, MXFP4"]),
}
NOT_INVARIANT = {"latent attention", "latent attention and experts", "Kimi delta attention"}
MARKS = dict.fromkeys(("weights in float8", "experts in float8"), needs_float8)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS.get(kind, ())) for kind in QUANTIZED | UNQUANTIZED])
def test_drafts_change_no_text_of_any_kind_of_target(tmp_path: Path, kind: str) -> None:
    target, invariant = (QUANTIZED | UNQUANTIZED)[kind](tmp_path / "target"), kind not in NOT_INVARIANT
    how: dict[str, Any] = {"target": target, "drafting": NGRAM, "backend": INVARIANT if invariant else "", "batch": 16}
    with LLM(bundle_of(tmp_path / "2", **how), overlap=False) as llm:  # copies need no promise
        before, requests = logprobs(llm), [*REPEATING, *texts(6, words=lambda i: 5 * i % 30), *MIXED]
        if invariant:
            check_invisible(llm, requests)
        else:  # bits depend on the calls, which differ once prompts are cached
            lengths = [len(output.token_ids) for output in drive(llm, requests)]
            assert lengths[: -len(MIXED)] == [40] * (len(requests) - len(MIXED))
        prompt, greedy = [*range(66), 7], SamplingParams(max_tokens=6, temperature=0)
        first, again = (llm.generate(prompt, greedy) for _ in range(2))
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 64)
        if invariant:
            assert again.token_ids == first.token_ids
    if kind in QUANTIZED:
        with LLM(bundle_of(tmp_path / "1", ranks=1, **how)) as llm:
            assert_near(before, logprobs(llm), 0.1)


@pytest.mark.parametrize("kind", UNQUANTIZED)
def test_targets_of_any_kind_have_the_logits_of_transformers(tmp_path: Path, kind: str) -> None:
    """In float32: random routers and recurrent layers amplify the rounding of 16 bits."""
    target = UNQUANTIZED[kind](tmp_path / "target")
    with LLM(bundle_of(tmp_path, target=target, drafting='kind = "none"', dtype="float32"), cuda_graphs=False) as llm:
        assert_near(logprobs(llm), transformers_logprobs(target), 3e-3)
