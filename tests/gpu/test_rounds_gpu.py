"""Rounds on a CUDA device: graphs give the same tokens as eager runs, and slots and memory have no effect."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tandemrt import LLM, RequestOutput, SamplingParams, StreamOutput
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.runtime.device.graphs import Graphs
from tandemrt.runtime.metrics.metrics import Metrics
from tests.gpu.rounds import (
    EVEN,
    MIXED,
    answered,
    by_graphs_and_eagerly,
    drive,
    output_of,
    paged,
    tiny,
    where_texts_part,
)
from tests.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp(request.param) / "tiny", backend=paged(), dtype=request.param)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = Recipe.load(ROOT / "engines/recipes/demo.toml", backend="onnxruntime-cuda", dtype="float16")
    return build(recipe, tmp_path_factory.mktemp("demo") / "bundle").folder


def runs_until_no_shape_is_new(llm: LLM) -> Iterator[tuple[list[RequestOutput], int]]:
    """Yield each run's outputs and the bytes it left on the GPU; the last run captures no graph.

    A shape with prompts is captured when it comes again. A loaded host may see an end one round later, which changes
    the shapes that follow, so the number of runs is not fixed.
    """
    for _ in range(8):
        shapes, allocated = (llm.metrics.graphs_captured, dict(llm.metrics.eager_runs)), allocated_bytes()
        outputs = drive(llm, MIXED)
        yield outputs, allocated_bytes() - allocated
        if (llm.metrics.graphs_captured, llm.metrics.eager_runs) == shapes:
            return
    pytest.fail("eight equal runs, and each of them captured a graph")


def allocated_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_every_subgraph_of_rounds_without_prompts_is_a_graph(bundle: Path) -> None:
    with LLM(bundle) as llm:
        drive(llm, MIXED)
        metrics = llm.metrics
        print(f"captured {metrics.graphs_captured}, replays {metrics.graph_replays}, eager {metrics.eager_runs}")
        assert set(metrics.eager_runs) == {"prompts"}
        assert metrics.graphs_captured >= 3
        runs = metrics.graphs_captured + metrics.graph_replays + metrics.eager_runs["prompts"]
        assert runs >= 3 * metrics.rounds
        assert metrics.rounds <= metrics.waits


def test_a_shape_that_first_occurs_next_to_free_slots_is_a_graph(bundle: Path) -> None:
    """Free slots write into one scratch block. Only the last request has draft windows of two tokens."""
    requests = [(prompt, params | {"max_tokens": 8}) for prompt, params in EVEN[:3]]
    requests.append((EVEN[3][0], EVEN[3][1] | {"num_draft_tokens": 2}))
    with LLM(bundle) as llm:
        drive(llm, requests)
        assert set(llm.metrics.eager_runs) == {"prompts"}


@pytest.mark.parametrize("requests", [MIXED, EVEN], ids=["mixed", "even"])
def test_replayed_graphs_write_what_eager_runs_write(bundle: Path, requests: Any) -> None:
    by_graphs, eagerly = by_graphs_and_eagerly(bundle, requests)
    assert by_graphs == eagerly


def test_overlap_changes_no_token(bundle: Path) -> None:
    (overlapped, _), (in_lockstep, _) = (answered(bundle, EVEN, overlap=overlap) for overlap in (True, False))
    assert output_of(overlapped) == output_of(in_lockstep)


def test_runs_with_warm_graphs_repeat_the_first(bundle: Path) -> None:
    with LLM(bundle) as llm:
        first = drive(llm, MIXED)
        for outputs, _ in runs_until_no_shape_is_new(llm):
            assert output_of(outputs) == output_of(first)


def test_slots_change_no_token(bundle: Path) -> None:
    with LLM(bundle) as llm:
        straight = output_of(drive(llm, EVEN))
        for order in ([1, 2, 3, 0], [3, 2, 1, 0], [2, 0, 3, 1]):
            permuted = output_of(drive(llm, [EVEN[i] for i in order]))
            assert permuted == [straight[i] for i in order]


def test_unwritten_cache_entries_are_not_read(bundle: Path) -> None:
    outputs = []
    for poison in (0.0, float("nan")):
        with LLM(bundle) as llm:
            with torch.inference_mode():
                for cache in (llm.loop.target.cache, *llm.loop.drafter.caches):
                    for tensor in cache.tensors.values():
                        tensor.fill_(poison)
            torch.cuda.synchronize()
            outputs.append(output_of(drive(llm, MIXED)))
    assert outputs[0] == outputs[1]


def test_memory_comes_back_and_rounds_allocate_nothing(bundle: Path) -> None:
    with LLM(bundle) as llm:
        table = llm.loop.cache_manager
        before = table.allocator.available  # type: ignore[attr-defined]
        *_, (_, allocated) = runs_until_no_shape_is_new(llm)
        assert allocated <= 0
        assert table.allocator.available == before  # type: ignore[attr-defined]
        state = llm.loop.target.state
        assert eventually(lambda: not table.device.any() and not state.view("length", 4).any())  # type: ignore[attr-defined]


def test_requests_wait_for_memory_and_are_all_served(bundle: Path) -> None:
    with LLM(bundle, cache_tokens=128) as few, LLM(bundle) as many:
        assert few.loop.cache_manager.allocator.blocks == 3  # type: ignore[attr-defined]  # two, and scratch
        lengths = [len(output.token_ids) for output in drive(few, EVEN)]
        assert lengths == [len(output.token_ids) for output in drive(many, EVEN)]


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_draft_windows_are_compared_with_autoregressive_decoding(bundle: Path, window: int) -> None:
    """A draft window and a single token may round differently, so noise texts may differ: reported, and few."""
    (plain, counted), (drafted, metrics) = (answered(bundle, MIXED, num_draft_tokens=size) for size in (0, window))
    assert {*counted.eager_runs, *metrics.eager_runs} == {"prompts"}
    assert sum(at is None for at in where_texts_part(drafted, plain)) >= len(MIXED) // 2


def test_the_rejection_rule_is_reproducible_and_changes_no_greedy_request(bundle: Path) -> None:
    requests = [(prompt, params | {"rule": "rejection"}) for prompt, params in EVEN]
    with LLM(bundle) as llm:
        first, second = (output_of(drive(llm, requests)) for _ in range(2))
        coupled = output_of(drive(llm, EVEN))
        assert set(llm.metrics.eager_runs) == {"prompts"}
        assert first == second
        assert first[0] == coupled[0]  # temperature 0
        assert sum(llm.metrics.accepted) > 0


def test_requests_come_go_and_are_cancelled_under_graphs(bundle: Path) -> None:
    with LLM(bundle) as llm:
        cancelled = threading.Semaphore(0)

        def victim(item: StreamOutput) -> None:
            if item.output is not None:
                cancelled.release()

        endless = SamplingParams(temperature=1.0, seed=3, ignore_eos=True)
        for i in range(8):
            request = llm.submit(f"victim {i}", endless, victim)
            outputs = llm.generate([f"a {i}", f"b {i}"], SamplingParams(seed=1, max_tokens=5 + i, ignore_eos=True))
            llm.cancel(request)
            assert [len(output.token_ids) for output in outputs] == [5 + i] * 2
        assert all(cancelled.acquire(timeout=PATIENCE_S) for _ in range(8))
        assert set(llm.metrics.eager_runs) == {"prompts"}
        assert llm.loop.cache_manager.allocator.available == llm.loop.cache_manager.allocator.blocks - 1  # type: ignore[attr-defined]


def test_demo_answers_are_compared_with_the_cpus(demo: Path, demo_bundle: Path) -> None:
    from tools.demo import held_out

    requests = [(e.prompt_messages(), {"temperature": 0.0, "max_tokens": 200}) for e in held_out(16)]
    with LLM(demo, profile=True) as gpu:
        outputs = drive(gpu, requests)
        drive(gpu, requests)
        print("device ms per round", {k: round(v, 3) for k, v in gpu.metrics.device_ms_per_round.items()})
        print("accepted", gpu.metrics.accepted, "of", gpu.metrics.steps, "eager", gpu.metrics.eager_runs)
    with LLM(demo_bundle, device="cpu", threads=4, num_draft_tokens=0) as cpu:
        expected = drive(cpu, requests)
        parted = []
        for at, mine, theirs in zip(where_texts_part(outputs, expected), outputs, expected, strict=True):
            if at is not None:
                logits = cpu_logits(cpu, theirs.prompt_token_ids + theirs.token_ids[:at])
                gap = float(logits[theirs.token_ids[at]] - logits[mine.token_ids[at]])
                parted.append((at, round(gap, 4)))
                assert gap < 0.25, "a token that float16 can hardly confuse with the right one"
        print(f"{len(parted)} of {len(requests)} texts part from the CPU's; (index, logit gap): {parted}")
    assert len(parted) <= len(requests) // 4


def cpu_logits(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """Return the logits of the token after ``tokens``, from one call with an empty cache."""
    engine = llm.loop.target.engines["target"]
    contract, count = engine.contract, len(tokens)
    sizes = {"batch": 1, "query": count, "rows": 1}
    tensors = {
        b.name: torch.zeros(b.resolve(sizes), dtype=getattr(torch, b.dtype))
        for b in (*contract.inputs, contract["logits"])
    }
    tensors["token_ids"][0] = torch.tensor(tokens)
    tensors["score_rows"][0, 0] = count - 1
    engine.bind(tensors).run()
    return tensors["logits"][0, 0]


def graphs() -> tuple[Graphs, Metrics]:
    metrics = Metrics()
    return Graphs(torch.device("cuda"), metrics), metrics


def stream_after_inputs() -> torch.cuda.Stream:
    """Return a stream that waits for the inputs, which were filled on the default stream."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def run_thrice(work: Callable[[], None], **tensors: Any) -> Metrics:
    captured, metrics = graphs()
    with torch.inference_mode(), torch.cuda.stream(stream_after_inputs()):
        for _ in range(3):
            captured.run("phase", work, **tensors)
        torch.cuda.synchronize()
    return metrics


def test_a_subgraph_that_changes_declared_state_is_captured_and_changes_it_once_per_run() -> None:
    x, y = torch.zeros(5, device="cuda"), torch.zeros(5, device="cuda")

    def work() -> None:
        x.add_(1)
        torch.mul(x, 2, out=y)

    metrics = run_thrice(work, outputs=[y], state=[x])
    assert (metrics.graphs_captured, metrics.graph_replays, metrics.eager_runs) == (1, 2, {})
    assert x.tolist() == [3] * 5
    assert y.tolist() == [6] * 5


def test_a_subgraph_that_is_not_repeatable_runs_eagerly_by_name() -> None:
    hidden, y = torch.zeros(5, device="cuda"), torch.zeros(5, device="cuda")

    def work() -> None:
        hidden.add_(1)
        y.copy_(hidden)

    metrics = run_thrice(work, outputs=[y])
    assert (metrics.graphs_captured, metrics.eager_runs) == (0, {"capture-mismatch": 3})


def test_a_subgraph_that_waits_for_the_device_runs_eagerly_by_name() -> None:
    y = torch.zeros(5, device="cuda")

    def work() -> None:
        y.fill_(y.sum().item() * 0 + 7)

    metrics = run_thrice(work, outputs=[y])
    assert (metrics.graphs_captured, metrics.eager_runs) == (0, {"capture-failed": 3})
    assert y.tolist() == [7] * 5


def test_a_subgraph_with_prompts_is_captured_when_its_shape_occurs_again() -> None:
    x, y = torch.zeros(5, device="cuda"), torch.zeros(5, device="cuda")
    captured, metrics = graphs()
    with torch.inference_mode(), torch.cuda.stream(stream_after_inputs()):
        for run in range(1, 6):
            x.fill_(run)
            captured.run_with_prompts("shape", lambda: torch.mul(x, 2, out=y), [x, y])
            assert y.tolist() == [2 * run] * 5
    assert (metrics.graphs_captured, metrics.graph_replays, metrics.eager_runs) == (1, 3, {"prompts": 2})


def test_a_subgraph_with_prompts_that_waits_runs_eagerly_afterwards() -> None:
    y = torch.zeros(5, device="cuda")
    captured, metrics = graphs()
    with torch.inference_mode(), torch.cuda.stream(stream_after_inputs()):
        for _ in range(4):
            captured.run_with_prompts("shape", lambda: y.fill_(y.sum().item() + 1), [y])
        captured.run_with_prompts("other", lambda: y.fill_(7), [y])
        captured.run_with_prompts("other", lambda: y.fill_(7), [y])
        torch.cuda.synchronize()
    assert metrics.eager_runs == {"prompts": 4, "capture-failed": 2}
    assert (metrics.graphs_captured, y.tolist()) == (1, [7] * 5)


def test_bundles_of_one_process_capture_at_the_same_time() -> None:
    def capture(count: int) -> int:
        y = torch.zeros(5, device="cuda")
        captured, metrics = graphs()
        with torch.inference_mode(), torch.cuda.stream(stream_after_inputs()):
            for key in range(count):
                captured.run(key, lambda key=key: torch.add(torch.ones_like(y), key, out=y), outputs=[y])  # type: ignore[misc]
        return metrics.graphs_captured

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(capture, [50] * 4)] == [50] * 4


def test_a_subgraph_is_captured_after_a_failed_capture_of_another() -> None:
    y = torch.zeros(5, device="cuda")
    captured, metrics = graphs()

    def wait() -> None:
        y.fill_(y.sum().item())

    def fill() -> None:
        torch.add(torch.ones_like(y), 7, out=y)

    with torch.inference_mode(), torch.cuda.stream(stream_after_inputs()):
        for _ in range(2):
            captured.run("wait", wait, outputs=[y])
            captured.run("fill", fill, outputs=[y])
        torch.cuda.synchronize()
    assert (metrics.graphs_captured, metrics.graph_replays, metrics.eager_runs) == (1, 1, {"capture-failed": 2})
    assert y.tolist() == [8] * 5
