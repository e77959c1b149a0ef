"""Rounds on a CUDA device. All requests arrive before the first round, so runs have equal shapes and bits."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandemrt import LLM, RequestOutput, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.runtime.metrics.metrics import Metrics
from tests.gpu.here import compute_capabilities, skipped_without_equal_bits
from tests.makers import tiny_checkpoint, write_recipe
from tests.waiting import eventually
from tools.bench.gpu.ties import first_difference

Requests = Sequence[tuple[Any, dict[str, Any]]]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy", "zzz"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}

# Every constraint and filter, greedy and sampled; more requests than slots.
MIXED: Requests = [
    ("hello the world", {"temperature": 0.0, "max_tokens": 30}),
    ("hello the world", {"temperature": 0.7, "seed": 5, "max_tokens": 30}),
    ("and the", {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": -3, "max_tokens": 25}),
    ("and the", {"temperature": 1.6, "top_n_sigma": 1.3, "top_k": 90, "seed": 21, "max_tokens": 25}),
    ("x", {"temperature": 1.0, "seed": 2**64 - 1, "max_tokens": 1}),
    ("why <think>", {"temperature": 0.9, "seed": 8, "thinking_token_budget": 7, "max_tokens": 40}),
    ("why <think>", {"temperature": 0.0, "thinking_token_budget": 0, "max_tokens": 20}),
    ("json <think>", {"seed": 11, "thinking_token_budget": 9, "structured_outputs": {"json": SCHEMA}}),
    ("json", {"temperature": 0.0, "structured_outputs": {"json": SCHEMA}}),
    ("digits", {"seed": 1, "structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}),
    ("a long prompt " * 5, {"temperature": 0.8, "seed": 6, "max_tokens": 12, "stop": ["a", "ne"]}),
]

# One request per slot, all of one length, so every round has one shape.
EVEN: Requests = [
    (f"row {i} ", {"temperature": 0.4 * i, "seed": i, "max_tokens": 40, "ignore_eos": True}) for i in range(4)
]

# Most of these texts repeat one token, so copies are accepted; two choose between two tokens, so many copies are.
REPEATING: Requests = [
    (
        f"row {i} ",
        {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "logit_bias": dict.fromkeys(tokens, 100.0)},
    )
    for i, tokens in enumerate([*((70 + i,) for i in range(8)), (70, 71), (72, 73)])
]


def texts(count: int, *, words: Callable[[int], int]) -> Requests:
    """Texts of 40 tokens, greedy and sampled; prompt i has ``words(i)`` words."""
    return [
        (
            f"row {i} " + "the " * words(i),
            {"temperature": 0.3 * (i % 4), "seed": i, "max_tokens": 40, "ignore_eos": True},
        )
        for i in range(count)
    ]


def check_invisible(bundle: Path, requests: Requests, **options: Any) -> None:
    """Assert that draft windows of 4, 2 and no tokens give equal texts, all requests at once and each alone.

    There are more requests than slots. ``options``: of the LLM.
    """
    texts = []
    for window in (0, 4, 2):
        fixed = {"num_draft_tokens": window, "adaptive_draft_tokens": False, **options}
        with skipped_without_equal_bits(), LLM(bundle, **fixed) as llm:
            texts.append([output.token_ids for output in drive(llm, requests)])
            if window:
                texts.append([drive(llm, [each])[0].token_ids for each in requests])
                assert llm.metrics.drafted > 0
    assert all(each == texts[0] for each in texts)


def tiny(
    folder: Path, *, backend: str, dtype: str, window: int = 4, kv_dtype: str | None = None, **limits: int
) -> Path:
    """A bundle of random models. Its text is noise, so one wrong token changes all following ones."""
    folder.mkdir(exist_ok=True)
    target = tiny_checkpoint(folder / "target", seed=1, head_dim=32)
    draft = tiny_checkpoint(folder / "draft", layers=1, seed=1, head_dim=32)
    recipe = folder / "tiny.toml"
    sizes = {"prefill_chunk": 64, **limits}  # so that requests that arrive together start in one round
    write_recipe(recipe, target=target, draft=draft, window=window, backend=backend, dtype=dtype, **sizes)
    return build(Recipe.load(recipe, kv_dtype=kv_dtype), folder / "bundle").folder


def paged() -> str:
    """The recipe's [backend] for this machine's GPU."""
    return f'name = "onnxruntime-cuda"\ncache = "paged"\ncompute_capabilities = {list(compute_capabilities())}'


def drive(llm: LLM, requests: Requests, *, timeout_s: float = 120) -> list[RequestOutput]:
    """Run ``requests``, all queued before their first round. The loop is idle before."""
    outputs: dict[int, RequestOutput] = {}
    ended, everybody = threading.Semaphore(0), []
    for index, (prompt, params) in enumerate(requests):

        def listen(item: Any, index: int = index) -> None:
            if item.output is not None:
                outputs[index] = item.output
                ended.release()

        [waiting] = llm._admission.admit(prompt, SamplingParams(**params), listen)
        waiting.prepare()  # compiles the grammar, else after it is queued
        waiting.constraints.result(timeout_s)
        everybody.append(replace(waiting, prepare=lambda: None))
    queue = llm.loop.scheduler._changed
    with queue:  # the loop waits until all of them are queued
        for waiting in everybody:
            llm._loop_thread.submit(waiting, block=True)
    for count in range(len(requests)):
        assert ended.acquire(timeout=timeout_s), f"{count} of {len(requests)} after {timeout_s} s"
    assert eventually(lambda: bool(queue._waiters))  # type: ignore[attr-defined]
    failed = [output.error for output in outputs.values() if output.finish_reason == "error"]
    assert not failed, failed
    return [outputs[index] for index in range(len(requests))]


def output_of(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], str, str, str]]:
    return [(output.token_ids, output.reasoning, output.text, output.finish_reason) for output in outputs]


def answered(bundle: Path, requests: Requests, **options: Any) -> tuple[list[RequestOutput], Metrics]:
    """Return the outputs of ``bundle``, opened with ``options``, for ``requests``, and the metrics of the run."""
    with LLM(bundle, **{"device": "cuda", **options}) as llm:
        return drive(llm, requests), llm.metrics


def by_graphs_and_eagerly(bundle: Path, requests: Requests = MIXED) -> list[list[tuple[list[int], str, str, str]]]:
    """Return the outputs of ``bundle`` with CUDA graphs, and without."""
    (by_graphs, _), (eagerly, metrics) = (answered(bundle, requests, cuda_graphs=on) for on in (True, False))
    assert set(metrics.eager_runs) == {"off"}
    return [output_of(by_graphs), output_of(eagerly)]


def where_windows_part(bundle: Path, requests: Requests = EVEN, window: int = 4) -> list[int | None]:
    """Return and print where texts with ``window`` drafted tokens differ from autoregressive decoding."""
    plain, _ = answered(bundle, requests, num_draft_tokens=0)
    return where_texts_part(answered(bundle, requests, num_draft_tokens=window)[0], plain)


def where_texts_part(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> list[int | None]:
    """Return and print the first differing token of each text, None if equal."""
    places = [first_difference(a.token_ids, b.token_ids) for a, b in zip(outputs, expected, strict=True)]
    print(f"texts part at {places}")
    return places
