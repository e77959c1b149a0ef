"""A target over two ranks, which are two processes on a CPU, serves requests as one process does."""

import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from pydantic import ValidationError
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandemrt import LLM, RequestOutput, SamplingParams
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.digest import holds_weights
from tandemrt.engines.bundle.manifest import Manifest
from tandemrt.engines.contract.dtypes import BYTES
from tandemrt.engines.contract.operators import COLLECTIVES
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadRecipe, InternalError, TandemError
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.capacity import fitting
from tandemrt.export.quantize.columns import write_shards
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.latent import Latent
from tandemrt.export.read.layer import QKNorm, Variants
from tandemrt.export.read.recurrent_layers import DeltaNet, Mamba2, ShortConvolution
from tandemrt.export.read.shard import require_splittable
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import with_graph_names
from tandemrt.plugins.operators.shared_ranks import SharedRanks, shared_bytes
from tandemrt.plugins.tensors.host_tensor import CPU
from tandemrt.runtime.check.decoder_run import DecodePlan, score_as_served, score_at_once
from tandemrt.runtime.check.reference import open_reference
from tandemrt.runtime.device.backends.onnxruntime.executor import Executor
from tests.engine import quantized
from tests.engine.decoding import Decoder, expected_logits, make_checkpoint, open_steps
from tests.engine.draft_kinds import EAGLE3
from tests.engine.test_quantized_checkpoints import FLOAT8, INT4, OTHERS, Float8
from tests.engine.test_quantized_experts import as_built
from tests.engine.test_quantized_experts import write as write_experts
from tests.makers import VOCAB, tiny_checkpoint, tiny_tokenizer, write_recipe
from tests.mtp import MtpLayer, add_layers
from tests.waiting import eventually

PAGED = 'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]'
ALTERNATING = ["linear_attention", "full_attention"]
PROMPTS = ["the and the", '{"a":', "hello world " * 4, "x"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary that two ranks cannot split evenly, and an MTP layer after those of the target."""
    target = tiny_checkpoint(tmp_path_factory.mktemp("checkpoints"), vocab=321, seed=1, head_dim=32)
    add_layers(target, [MtpLayer(hidden=32, target_layers=2, head_dim=32)])
    return target


@pytest.fixture(scope="module")
def bundle(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    recipe = write_recipe(
        folder / "two.toml",
        target=target,
        drafting=f'kind = "mtp"\ncheckpoint = "{target}"\nnum_draft_tokens = 4',
        backend=f"{PAGED}\ntensor_parallel = 2",
        prefill_chunk=64,
        length=192,
    )
    return build(Recipe.load(recipe), folder / "two").folder


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, device="cpu", threads=1) as opened:
        yield opened


def texts(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.finish_reason) for output in outputs]


def sampled(**more: Any) -> list[SamplingParams]:
    return [SamplingParams(seed=seed, temperature=0.8, max_tokens=24, **more) for seed in range(len(PROMPTS))]


def test_both_ranks_run_the_same_operators_though_one_has_features(bundle: Path) -> None:
    """A norm in another kernel would round otherwise: the bits of a rank's logits would depend on the draft."""
    opened = Bundle.open(bundle)
    first, second = opened.engine("target").decoder, opened.manifest.ranks[0].decoder
    assert first is not None
    assert second is not None
    assert [operator.name for operator in first.operators] == [operator.name for operator in second.operators]


def test_logits_of_two_ranks_are_those_of_transformers(llm: LLM, target: Path) -> None:
    prompt = list(range(40, 80))
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=20, logprobs_mode="raw", ignore_eos=True)
    output = llm.generate(prompt, params)
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], -1)
    assert output.logprobs is not None
    for token, logprob in output.logprobs[0].top:
        assert abs(logprob - float(expected[token])) < 1e-4


def test_check_compares_two_processes_with_two_threads_in_float32(llm: LLM) -> None:
    plan = DecodePlan.within(llm.bundle.limits, llm.bundle.valid_tokens)
    rows, length = len(plan.tokens), len(plan.tokens[0])
    call = {"batch": rows, "query": length, "rows": length, "tokens": rows * length}
    expected = score_at_once(open_reference(llm.bundle, "target", 1, call), plan)
    scored = list(score_as_served(llm.loop.target.engines["target"], plan))
    assert {kind for kind, *_ in scored} >= {"packed", "window", "one"}
    for kind, row, position, logits in scored:
        np.testing.assert_allclose(logits, expected[row, position], atol=1e-4, err_msg=f"{kind} {row} {position}")


def test_logits_of_four_ranks_are_those_of_transformers(tmp_path: Path) -> None:
    """Beyond rank 1, which is both the second and the last of two."""
    sizes = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": VOCAB + 1,
        "eos_token_id": 263,
    }
    model = make_checkpoint("qwen3", tiny_tokenizer(tmp_path / "model"), sizes=sizes)
    recipe = write_recipe(
        tmp_path / "four.toml", target=tmp_path / "model", backend=f"{PAGED}\ntensor_parallel = 4", length=64
    )
    bundle = Bundle.open(build(Recipe.load(recipe), tmp_path / "four").folder)
    decoders = [bundle.engine("target").decoder, *(entry.decoder for entry in bundle.manifest.ranks)]
    files = [subgraph.file for decoder in decoders if decoder is not None for subgraph in decoder.subgraphs]
    assert (len(decoders), len({*files})) == (4, len(files))
    plan = DecodePlan.within(bundle.limits, bundle.valid_tokens)
    rows, length = len(plan.tokens), len(plan.tokens[0])
    call = {"batch": rows, "query": length, "rows": length, "tokens": rows * length}
    logits = score_at_once(open_reference(bundle, "target", 1, call), plan)
    with torch.inference_mode():
        expected = model(torch.tensor(plan.tokens)).logits
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("refused", [True, False], ids=["refused thread", "failed rank"])
def test_the_reference_of_two_ranks_waits_for_no_rank_after_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    plan = DecodePlan.within(llm.bundle.limits, llm.bundle.valid_tokens)
    rows, length = len(plan.tokens), len(plan.tokens[0])
    call = {"batch": rows, "query": length, "rows": length, "tokens": rows * length}
    reference = open_reference(llm.bundle, "target", 1, call)
    start, exchange, started = Thread.start, SharedRanks.exchange, list[Thread]()

    def refuse_the_second(thread: Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def fail_in_rank_1(ranks: SharedRanks, part: np.ndarray) -> list[np.ndarray]:
        if ranks.rank:
            raise InternalError("ranks: rank 1 has no memory")
        return exchange(ranks, part)

    if refused:
        monkeypatch.setattr(Thread, "start", refuse_the_second)
    else:
        monkeypatch.setattr(SharedRanks, "exchange", fail_in_rank_1)
    for _ in range(2):
        with pytest.raises(InternalError, match="ranks: a thread could not start" if refused else "no memory"):
            score_at_once(reference, plan)


def test_speculation_changes_no_text_on_two_ranks(llm: LLM) -> None:
    drafted = llm.generate(PROMPTS, sampled())
    alone = [llm.generate(p, s) for p, s in zip(PROMPTS, sampled(num_draft_tokens=0), strict=True)]
    assert texts(drafted) == texts(alone)
    assert sum(output.speculation.num_accepted_draft_tokens for output in drafted) > 0
    assert all(not output.speculation.num_draft_tokens for output in alone)


def test_grammars_budgets_prefix_hits_and_cancellations_run_over_two_ranks(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    structured = SamplingParams(seed=3, max_tokens=60, structured_outputs={"json": schema})
    shared = "one beginning of all prompts that fills a block of sixty-four tokens, and then some"
    first = llm.generate(shared + "<think>", structured.model_copy(update={"thinking_token_budget": 4}))
    assert first.forced_ends == 1
    assert json.loads(first.text)["a"] in ("x", "y")
    again = llm.generate([shared + " 1", shared + " 2"], sampled()[:2])
    assert all(output.num_cached_tokens == 64 for output in again)
    done: list[Any] = []
    request = llm.submit("never ends", SamplingParams(max_tokens=80, ignore_eos=True), lambda item: done.append(item))
    llm.cancel(request)
    assert eventually(lambda: bool(done) and done[-1].output is not None)
    assert done[-1].output.finish_reason == "cancelled"
    assert texts(llm.generate(PROMPTS, sampled())) == texts(llm.generate(PROMPTS, sampled()))


def test_a_rank_that_dies_ends_every_request_and_is_named(bundle: Path) -> None:
    with LLM(bundle, device="cpu", threads=1) as llm:
        process = llm.loop.target.engines["target"]._processes._processes[0]  # type: ignore[attr-defined]
        items: list[Any] = []
        params = SamplingParams(max_tokens=80, ignore_eos=True)
        requests = [llm.submit(prompt, params, items.append) for prompt in PROMPTS]
        assert eventually(lambda: len(items) > 3)
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: sum(item.output is not None for item in items) == len(requests))
        ended = [item.output for item in items if item.output is not None]
        assert {output.finish_reason for output in ended} == {"error"}
        assert all("tensor_parallel: rank 1 was ended by SIGKILL" in str(output.error) for output in ended)
        assert eventually(lambda: llm.closed)
        with pytest.raises(TandemError, match="rank 1 was ended by SIGKILL"):
            llm.generate(PROMPTS[0])


def test_a_rank_that_dies_closes_an_llm_without_requests(bundle: Path) -> None:
    with LLM(bundle, device="cpu", threads=1) as llm:
        process = llm.loop.target.engines["target"]._processes._processes[0]  # type: ignore[attr-defined]
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: llm.closed)
        with pytest.raises(TandemError, match="rank 1 was ended by SIGKILL"):
            llm.generate(PROMPTS[0])


@pytest.mark.parametrize("how", ["timeout", "cancel", "close"])
def test_a_request_ends_in_time_though_a_rank_is_stopped(bundle: Path, how: str) -> None:
    with LLM(bundle, device="cpu", threads=1) as llm:
        process = llm.loop.target.engines["target"]._processes._processes[0]  # type: ignore[attr-defined]
        items: list[Any] = []
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))  # the first round of a busy machine takes seconds
        timeout_s = 3.0 if how == "timeout" else None
        params = SamplingParams(max_tokens=80, ignore_eos=True, timeout_s=timeout_s)
        request = llm.submit(PROMPTS[0], params, items.append)
        assert eventually(lambda: bool(items))
        os.kill(process.pid, signal.SIGSTOP)
        assert eventually(lambda: llm.problem == "rank 1 is stopped (SIGSTOP)")
        if how == "cancel":
            llm.cancel(request)
        elif how == "close":
            llm.close()
        assert eventually(lambda: items[-1].output is not None)
        assert "rank 1 is stopped (SIGSTOP)" in str(items[-1].output.error)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a model with delta nets, latent attention and experts, and of an EAGLE-3 head."""
    folder = tmp_path_factory.mktemp("hybrid")
    sizes = {"vocab_size": VOCAB, "moe_intermediate_size": 32, "eos_token_id": 263, "bos_token_id": 262}
    model = make_checkpoint("kimi_linear", folder / "target", sizes=sizes)
    head = replace(EAGLE3, hidden=model.config.hidden_size).save(folder / "draft")
    recipe = write_recipe(
        folder / "r.toml",
        target=tiny_tokenizer(folder / "target"),
        drafting=f'kind = "eagle3"\ncheckpoint = "{head}"\nnum_draft_tokens = 4',
        backend=f"{PAGED}\ntensor_parallel = 2",
        prefill_chunk=64,
        length=90,
        batch=2,
    )
    return build(Recipe.load(recipe), folder / "bundle").folder


def test_states_of_all_ranks_are_kept_for_prefix_hits_and_survive_preemption(hybrid: Path) -> None:
    entry = Bundle.read(hybrid).engine("target")
    assert entry.contract["past_state.0"].shape == ("slots", 2, 32, 32)  # of four heads
    prompts, greedy = [[at, *range(8)] * 2 for at in (40, 50)], SamplingParams(max_tokens=6, temperature=0)
    with LLM(hybrid, device="cpu", threads=1) as llm:
        expected = [llm.generate(prompt, greedy.model_copy(update={"num_draft_tokens": 0})) for prompt in prompts]
        grow, calls = llm.loop.slots.grow, itertools.count()
        llm.loop.slots.grow = lambda running: next(calls) != 5 and grow(running)  # type: ignore[method-assign]
        llm.loop.slots.unchanged_until = lambda _: 0  # type: ignore[method-assign]  # grow in every round
        together = llm.generate(prompts, greedy)
        assert texts(together) == texts(expected)
        assert llm.metrics.preemptions == 1
        assert sum(output.speculation.num_draft_tokens for output in together) > 0
        first, again = (llm.generate([*range(66), 7], greedy.model_copy(update={"max_tokens": 2})) for _ in range(2))
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 64)
        assert first.token_ids == again.token_ids


OF_EXPERTS = {  # every token selects all, so that rounding selects no others
    "vocab_size": VOCAB,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}


def write_quantized(target: Path, case: Any) -> PreTrainedModel:
    """Write a checkpoint; the model that it means rounds inputs as two ranks do, each by scales of its own."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
    model = make_checkpoint("qwen3", target, sizes=sizes | {"num_attention_heads": 8, "head_dim": 32})
    tiny_tokenizer(target)

    def rounded(_: torch.nn.Module, arguments: tuple[torch.Tensor], *, split: bool) -> tuple[torch.Tensor]:
        return (quantized.rounded(arguments[0], None, arguments[0].shape[-1] // 2 if split else 0),)

    with torch.no_grad():
        for name, meant in quantized.rewrite(target, case.config, case.store).items():
            matmul = model.get_submodule(name)
            matmul.weight.copy_(meant)
            if isinstance(case, Float8):
                matmul.register_forward_pre_hook(partial(rounded, split=name.endswith(("o_proj", "down_proj"))))
    return model


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (FLOAT8["compressed-tensors, channel, inputs by token"], "float32"),
        (INT4["gptq, zero points"], "float16"),
        (OTHERS["gptq, 8 bits"], "float16"),
        (OTHERS["modelopt, NVFP4"], "float16"),
    ],
)
def test_ranks_with_quantized_weights_have_the_logits_that_the_checkpoint_means(
    tmp_path: Path, case: Any, dtype: str
) -> None:
    model = write_quantized(tmp_path / "t", case)
    require_logits_of_ranks(tmp_path, model, dtype)


@pytest.mark.parametrize("case", [INT4["gptq_v2, zero points"], OTHERS["modelopt, W8A16"], OTHERS["quark, MXFP4"]])
def test_ranks_with_quantized_experts_have_the_logits_that_the_checkpoint_means(tmp_path: Path, case: Any) -> None:
    model = write_experts(tmp_path / "t", case, **OF_EXPERTS)
    tiny_tokenizer(tmp_path / "t")
    require_logits_of_ranks(tmp_path, model, "float16")


def require_logits_of_ranks(tmp_path: Path, model: PreTrainedModel, dtype: str) -> None:
    """The ranks are threads here; the checkpoint is in ``tmp_path``/t."""
    target = tmp_path / "t"
    recipe = write_recipe(tmp_path / "r.toml", target=target, dtype=dtype, backend=f"{PAGED}\ntensor_parallel = 2")
    bundle = Bundle.open(build(Recipe.load(recipe), tmp_path / "out").folder)
    plan = DecodePlan.within(bundle.limits, bundle.valid_tokens)
    entries = [bundle.engine("target"), *bundle.manifest.ranks]
    memory = bytearray(shared_bytes(2, 1 << 20))
    arrived = [[Semaphore(0) for _ in entries] for _ in entries]

    def logits(rank: int) -> list[Any]:
        ranks = SharedRanks(rank, memory, arrived)
        return list(score_as_served(Executor.open(bundle, entries[rank], CPU, 1, dict, ranks), plan))

    with ThreadPoolExecutor(2) as pool:
        ours, others = pool.map(logits, range(2))
    with torch.inference_mode():
        expected = model(torch.tensor(np.array(plan.tokens))).logits.numpy()
    for (*place, actual), (*_, other) in zip(ours, others, strict=True):
        np.testing.assert_array_equal(actual, other)
        _, row, position = place
        wanted = expected[row, position]
        assert np.linalg.norm(np.asarray(actual) - wanted) < 0.01 * np.linalg.norm(wanted)


def test_a_manifest_whose_ranks_exchange_parts_of_different_shapes_is_rejected(hybrid: Path) -> None:
    written = Bundle.read(hybrid).manifest.model_dump(mode="json")
    decoder = written["ranks"][0]["decoder"]
    part = next(step["inputs"][0] for step in decoder["steps"] if step.get("name") in COLLECTIVES)
    next(value for value in decoder["values"] if value["name"] == part)["shape"][0] = "rows"
    with pytest.raises(ValidationError, match="decoder on rank 1 must exchange the same parts as that on rank 0"):
        Manifest.model_validate_json(json.dumps(written))


def test_inspect_counts_what_a_rank_holds(hybrid: Path) -> None:
    manifest = Bundle.read(hybrid).manifest
    target, parts = manifest.engines["target"], {}
    for graph in (onnx.load(hybrid / file, load_external_data=False).graph for file in target.files):
        for each in (weight for weight in graph.initializer if weight.external_data):
            where = {entry.key: entry.value for entry in each.external_data}
            parts[where["location"], where["offset"]] = int(where["length"])
    rank = fitting(manifest, 10**9)
    draft = sum(f.size for name, f in manifest.files.items() if name.startswith("draft/") and holds_weights(name))
    assert 0.97 * sum(parts.values()) < rank.weights - draft <= sum(parts.values())  # norms and routers count as split
    states = [each for each in target.contract.inputs if each.name.startswith(("past_state.", "past_recent."))]
    nbytes = sum(prod(each.resolve({"slots": 4})) * BYTES[each.dtype] for each in states)  # two, and two copies
    split = fitting(manifest.model_copy(update={"ranks": ()}), 10**9, 2)  # as if this were the whole target
    assert rank.rounds - split.rounds == nbytes // 2


@pytest.mark.parametrize(
    ("case", "ranks", "sizes", "exchanges"),  # in a call: two of a layer, one of the logits
    [
        # rows of one tensor are queries, keys and values
        ("qwen3_5", 2, {"num_hidden_layers": 2, "layer_types": ALTERNATING}, 5),
        ("falcon_h1 with norms", 2, {"num_hidden_layers": 1}, 3),  # Mamba-2 in addition to attention
        # one group of a norm over all ranks
        ("granite 4 dense", 2, {"mamba_n_groups": 1, "num_hidden_layers": 2, "layer_types": ALTERNATING}, 6),
        ("lfm2", 2, {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, 5),
        # two KV heads, so two ranks have the same; a shared expert
        ("qwen2_moe", 4, {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}, 5),
    ],
)
def test_ranks_of_every_kind_of_layer_have_the_logits_of_transformers(
    tmp_path: Path, case: str, ranks: int, sizes: dict[str, Any], exchanges: int
) -> None:
    model = make_checkpoint(case, tmp_path / "whole", sizes=sizes)
    rows = [[(7 * at * at + row) % model.config.vocab_size for at in range(24)] for row in range(2)]
    logits = logits_of_ranks(tmp_path, tmp_path / "whole", ranks, rows, exchanges)
    expected = torch.stack([expected_logits(model, row) for row in rows])
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=0)


def test_ranks_with_experts_in_float8_have_the_logits_that_the_checkpoint_means(tmp_path: Path) -> None:
    """In float32, because onnxruntime has no matmul in bfloat16 on a CPU."""
    (tmp_path / "whole").mkdir()
    model = write_experts(tmp_path / "whole", FLOAT8["compressed-tensors, tensor, static inputs"], **OF_EXPERTS)
    rows = [[(7 * at * at + row) % VOCAB for at in range(24)] for row in range(2)]
    logits = logits_of_ranks(tmp_path, as_built(tmp_path / "whole"), 2, rows, 5)
    with torch.inference_mode():
        expected = model(torch.tensor(rows)).logits
    assert (logits - expected).norm() < 1e-3 * expected.norm()


def logits_of_ranks(
    tmp_path: Path, whole: Path, ranks: int, rows: Sequence[Sequence[int]], exchanges: int
) -> torch.Tensor:
    """Return those of the ranks, which are equal, of the checkpoint in ``whole``. The ranks are threads here."""
    arrived, memory = [[Semaphore(0) for _ in range(ranks)] for _ in range(ranks)], bytearray(1 << 18)

    def logits(rank: int) -> torch.Tensor:
        folder = tmp_path / str(rank)
        shutil.copytree(whole, folder)
        checkpoint = Checkpoint.open(folder)
        spec = ModelSpec.from_hf(checkpoint.config)
        shard = write_shards(with_graph_names(checkpoint, spec), spec, folder, ranks)[rank]
        opened = partial(open_steps, folder=folder, ranks=SharedRanks(rank, memory, arrived))
        decode = Decoder(folder, "paged", batch=2, shard=shard, open_engine=opened)
        assert isinstance(decode.engine, Executor)
        operators = decode.engine._decoder.operators
        assert sum(operator.name in COLLECTIVES for operator in operators) == exchanges
        calls = [slice(0, 16), slice(16, 20), slice(20, 24)]
        return torch.cat([decode([row[call] for row in rows], [call.start] * 2) for call in calls], 1)

    with ThreadPoolExecutor(ranks) as pool:
        first, *others = pool.map(logits, range(ranks))
    assert all(torch.equal(first, other) for other in others)
    return first


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 4), (2, 2), (4, 2), (8, 1)])
def test_shards_are_ranges_of_heads_and_together_the_whole(tmp_path: Path, ranks: int, kv_heads: int) -> None:
    rng = np.random.default_rng(0)
    spec = replace(ModelSpec.from_hf(CONFIG), heads=8, kv_heads=kv_heads, head_dim=2, intermediate=16)
    shapes = {"self_attn.q_proj": (16, 8), "self_attn.k_proj": (2 * kv_heads, 8), "self_attn.o_proj": (8, 16)}
    shapes |= {"mlp.up_proj": (16, 8), "mlp.down_proj": (8, 16)}
    whole = {f"model.layers.0.{name}.weight": rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    (tmp_path / "config.json").write_text("{}")
    save_file(whole, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    parts = [
        {name: shard.checkpoint(checkpoint, spec).read(name, tensor.shape, ("float32",)) for name, tensor in of.items()}
        for shard in write_shards(checkpoint, spec, tmp_path, ranks)
        for of in [shard.checkpoint(checkpoint, spec).tensors]
    ]
    for name, axis in ((name, int("o_proj" in name or "down_proj" in name)) for name in whole):
        pieces = [part[name] for part in parts]
        if "k_proj" in name and kv_heads < ranks:  # the KV head that the query heads of a rank read
            pieces = pieces[:: ranks // kv_heads]
            assert all((part[name] == pieces[rank * kv_heads // ranks]).all() for rank, part in enumerate(parts))
        np.testing.assert_array_equal(np.concatenate(pieces, axis), whole[name])


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32,
}


DELTA_NET = DeltaNet((True,), key_heads=2, value_heads=4, key_dim=8, value_dim=8, kernel=4)
MAMBA = Mamba2((True,), heads=12, head_dim=8, groups=2, state_dim=8, kernel=4, conv_bias=False)
CONVOLUTION = ShortConvolution((True,), kernel=3, channels=12, bias=False)


@pytest.mark.parametrize(
    ("change", "inputs", "why"),
    [
        ({"head_dim": 128}, 128, "the 16 inputs of its MLP's last matmul do not give 4 ranks multiples of 128"),
        ({"heads": 6, "kv_heads": 3}, 1, "its 6 attention heads are no multiple of 4"),
        ({"heads": 12, "kv_heads": 3}, 1, "its 3 KV heads are neither a multiple nor a divisor of 4"),
        ({"intermediate": 18}, 1, "the width of its MLP, 18, is no multiple of 4"),
        ({"latent": Latent(None, 512, 8, 64, 3, bias=False)}, 2, "the 12 inputs of its attention's last matmul do not"),
        ({"recurrent": DELTA_NET}, 1, "the 2 key heads of its recurrent layers are no multiple of 4"),
        (
            {"recurrent": replace(MAMBA, norm="before the gate")},
            1,
            "norm 2 groups of heads before the gate, which are fewer",
        ),
        ({"recurrent": replace(MAMBA, groups=6, norm=None)}, 1, "the 6 groups of its .* neither a multiple nor a"),
        ({"recurrent": CONVOLUTION}, 1, "its 12 channels of a convolution do not give 4 ranks an even number each"),
        ({"qk_norm": QKNorm(over_all_heads=True)}, 1, "norms queries and keys over all heads"),
        ({"sinks": True}, 1, "attention sinks, which are not split yet"),
        ({"stored_by_head": ("q", "k", "v")}, 1, "stores queries, keys and values by head"),
        ({"qk_norm": QKNorm(by_head=True)}, 1, "norms each head with weights of its own"),
        ({"normed_head": True}, 1, "divides the rows of lm_head by their lengths"),
        ({"variants": Variants(scaled=True)}, 1, "layers of different shapes"),
    ],
)
def test_a_model_that_cannot_be_split_is_rejected_by_name(change: dict[str, Any], inputs: int, why: str) -> None:
    checkpoint = Checkpoint(Path("models/x"), {}, {}, ())
    with pytest.raises(BadRecipe, match=f"backend.tensor_parallel = 4 cannot split .*models/x: .*{why}"):
        require_splittable(replace(ModelSpec.from_hf(CONFIG), **change), checkpoint, 4, inputs=inputs)


@pytest.mark.parametrize(
    ("dtype", "backend", "why"),
    [
        ("float32", 'name = "onnxruntime-cpu"\ntensor_parallel = 2', "unknown key 'tensor_parallel'"),
        ("bfloat16", 'name = "tensorrt"\ntensor_parallel = 2', "unknown key 'tensor_parallel'"),
        ("float32", f'{PAGED}\ncache = "linear"\ntensor_parallel = 2', "tensor_parallel needs backend.cache 'paged'"),
        ("float32", f"{PAGED}\ntensor_parallel = 3", "tensor_parallel: must be 1, 2, 4 or 8; got 3"),
    ],
)
def test_a_recipe_that_cannot_be_split_is_rejected_by_name(tmp_path: Path, dtype: str, backend: str, why: str) -> None:
    recipe = write_recipe(tmp_path / "r.toml", target=tmp_path, dtype=dtype, backend=backend)
    with pytest.raises(BadRecipe, match=why):
        Recipe.load(recipe)
