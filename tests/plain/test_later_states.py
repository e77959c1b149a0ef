"""What holds after the first step: of copies, second attempts, later calls and lists of which only some members fit."""

import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tandemrt.engines.options.model_name import HUB_NAME
from tandemrt.engines.validation.errors import BadCheckpoint, BadRequest, QueueFull
from tandemrt.export.compile.tensorrt import summary
from tandemrt.export.quantize import stored_integers
from tandemrt.export.read.checkpoint import DTYPES
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.plugins.kernels import cudnn_attention
from tandemrt.plugins.kernels.module import KernelModule
from tandemrt.runtime.cli import arguments, batch
from tandemrt.runtime.cli.answer import figures
from tandemrt.runtime.constraints.grammar_feed import GrammarFeed
from tandemrt.runtime.device.backends.onnxruntime.constants import stored_parts
from tandemrt.runtime.servers.http import rendering
from tandemrt.runtime.workers.clients import UNNAMED
from tandemrt.runtime.workers.sandbox.lanes import QUICK_S, ProcessLanes
from tandemrt.runtime.workers.sandbox.pool import ProcessPool, TooSlow
from tandemrt.runtime.workers.sandbox.process import interpreter
from tests.plain.constraints import byte_tokens, compiled


def test_a_copy_of_a_grammar_takes_back_what_was_fed_before_it() -> None:
    feed = GrammarFeed(compiled("regex", '"a(b|c)"').matcher())
    for token in byte_tokens('"a'):
        assert feed.accept(token)
    copy = feed.fork()
    assert copy.accept(*byte_tokens("b"))
    copy.undo()
    for each in (copy, feed):
        each.undo()
        assert all(map(each.accept, byte_tokens('"ac"')))


@pytest.mark.parametrize("idle", [0, 1])
def test_the_tasks_that_may_wait_are_those_of_all_processes(idle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessPool, "_start", lambda pool, _: pool._threads.setdefault(object(), None))
    pool = ProcessPool(processes=3, waiting=2)
    pool._idle = idle
    for _ in range(2 + idle):
        pool.submit(UNNAMED, "task", 1.0, print)
    with pytest.raises(QueueFull, match=r"task: the queue for worker processes is full \(2 tasks\); try later"):
        pool.submit(UNNAMED, "task", 1.0, print)


@pytest.mark.parametrize(("present", "chosen"), [(("own", "base"), "own"), (("base",), "base")])
def test_a_program_that_embeds_python_starts_that_of_its_environment(
    present: tuple[str, ...], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "tritonserver"))
    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path / "own"))
    monkeypatch.setattr(sys, "base_exec_prefix", str(tmp_path / "base"))
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for each in present:
        (tmp_path / each / "bin").mkdir(parents=True)
        (tmp_path / each / "bin" / name).touch(0o755)
    assert interpreter() == str(tmp_path / chosen / "bin" / name)


@pytest.mark.parametrize("limit_s", [QUICK_S / 2, QUICK_S, 3 * QUICK_S])
def test_a_slow_task_keeps_its_deadline_and_its_limits(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[tuple[float, dict[str, Any]]] = []

    def submit(_: ProcessPool, _client: object, _what: str, limit_s: float, *_function: Any, **more: Any) -> Any:
        submitted.append((limit_s, more))
        future: Future[Any] = Future()
        future.set_exception(TooSlow("slow"))
        return future

    monkeypatch.setattr(ProcessPool, "submit", submit)
    future = ProcessLanes().submit(UNNAMED, "task", limit_s, print, deadline=5.0, wait_s=60.0)
    assert isinstance(future.exception(1), TooSlow)
    assert [limit for limit, _ in submitted] == ([QUICK_S, limit_s] if limit_s > QUICK_S else [limit_s])
    assert all(more["deadline"] == 5.0 and 59 < more["wait_s"] <= 60 for _, more in submitted)


@pytest.mark.parametrize(
    ("name", "accepted"),
    [("a/b", True), ("a.b/c-d_e", True), ("a/b@main", True), ("a/b@refs/pr/7", True), ("a/b@v1.0", True), ("a", False),
     ("a/b@", False), ("a/b@refs/", False), ("a/b/c", False), ("-a/b", False), ("a/b@c@d", False), ("ä/b", False)],
)  # fmt: skip
def test_a_name_on_the_hub_may_have_a_revision_of_several_words(name: str, accepted: bool) -> None:
    assert bool(HUB_NAME.fullmatch(name)) == accepted


def test_a_row_of_prompts_needs_a_prompt_beside_its_schema() -> None:
    assert arguments._row('{"prompt": "x", "schema": {}}', "f line 1") == {"prompt": "x", "schema": {}}
    assert arguments._row('{"messages": []}', "f line 1") == {"messages": []}
    for line in ('{"schema": {}}', "{}", "[]", '"prompt"', "{"):
        with pytest.raises(BadRequest, match=r"--prompts: must hold one JSON object per line .*in f line 2"):
            arguments._row(line, "f line 2")


def test_a_batch_keeps_the_slots_of_all_models_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    llms = {
        name: SimpleNamespace(bundle=SimpleNamespace(limits=SimpleNamespace(batch=slots)))
        for name, slots in (("a", 3), ("b", 5))
    }

    class Opened:
        def __enter__(self) -> Any:
            return SimpleNamespace(llms=llms)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("tandemrt.runtime.servers.http.server.open_models", lambda *_: Opened())
    with batch._here({}, cast("Any", None), 1) as (_, in_flight):
        assert in_flight == 8 * batch.IN_FLIGHT_PER_SLOT


@pytest.mark.parametrize(("zeros", "fits"), [([[8, 8]], True), ([[8, 7]], False), ([[7, 8]], False), ([[7, 7]], False)])
def test_any_other_zero_point_of_a_symmetric_weight_is_rejected(
    zeros: list[list[int]], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (np.zeros((1, 64), np.uint8), np.ones((1, 2), np.float32), np.array(zeros))
    monkeypatch.setattr(stored_integers, "_gptq_or_awq", lambda *_: parts)
    scheme = Scheme("int4", "gptq", (1, 32), True)
    if fits:
        assert stored_integers._parts("m", {}, scheme, 1, 64)[2] is None
    else:
        with pytest.raises(BadCheckpoint, match="m: qzeros should all be 8 where sym is true, but 7 is one"):
            stored_integers._parts("m", {}, scheme, 1, 64)


def test_only_an_output_whose_parts_are_all_in_files_is_one_of_files(tmp_path: Path) -> None:
    np.arange(6, dtype=np.float32).tofile(tmp_path / "weights")
    stored = TensorProto(name="stored", data_type=TensorProto.FLOAT, dims=[3, 2], data_location=TensorProto.EXTERNAL)
    stored.external_data.add(key="location", value="weights")
    stored.external_data.add(key="length", value="24")
    inline = numpy_helper.from_array(np.ones((1, 2), np.float32), "inline")
    outputs = {"both": ("Concat", ["stored", "inline"]), "twice": ("Concat", ["stored", "stored"]),
               "alone": ("Identity", ["stored"]), "other": ("Identity", ["inline"])}  # fmt: skip
    nodes = [helper.make_node(op, inputs, [name], **({"axis": 0} if op == "Concat" else {}))
             for name, (op, inputs) in outputs.items()]  # fmt: skip
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], infos, [stored, inline])), tmp_path / "model.onnx")
    assert {name: len(parts) for name, parts in stored_parts(tmp_path / "model.onnx").items()} == {
        "twice": 2,
        "alone": 1,
    }


def test_a_summary_of_an_engine_counts_one_layer_too() -> None:
    report: dict[str, Any] = {
        "native": {"attention": 1, "norm": 3, "cache": 0}, "compiler": "c", "built_for": "b", "engine_layers": ["x"],
        "network_layers": {"a": 2, "b": 3}, "engine_not_opened": None, "profiles": {},
    }  # fmt: skip
    rows = summary._rows(report)
    assert (rows["native layers"], rows["network"]) == ("1 attention, 3 norm", "5 layers as parsed")
    assert rows["engine"] == "1 layers"


def test_a_summary_of_an_engine_gives_memory_in_megabytes_of_a_million_bytes() -> None:
    report: dict[str, Any] = {
        "native": {}, "compiler": "c", "built_for": "b", "engine_layers": None, "network_layers": {},
        "engine_not_opened": "why", "profiles": {
            "prompt": {"memory_bytes": 123_456_789, "inputs": {"tokens": [[1, 2, 4]], "past_key": [[9, 9, 9]]}},
            "round": {"memory_bytes": None, "inputs": {"tokens": [[1, 1, 1], [3, 3, 3]]}},
        },
    }  # fmt: skip
    rows = summary._rows(report)
    assert rows["profile prompt"] == "tokens [1-4 (best 2)]; 123.5 MB besides weights and caches"
    assert rows["profile round"] == "tokens [1, 3]"
    assert (rows["native layers"], rows["engine"]) == ("none", "not opened: why")


@pytest.mark.parametrize(("version", "plain", "sinks"), [(90_499, False, False), (90_500, True, False),
                                                         (91_299, True, False), (91_300, True, True)])  # fmt: skip
def test_attention_of_cudnn_with_sinks_needs_a_newer_version(
    version: int, plain: bool, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(backend_version=lambda: version))
    whether = cudnn_attention.unavailable.__wrapped__
    assert (whether() is None, whether(sinks=True) is None) == (plain, sinks)


def test_a_kernel_keeps_the_most_shared_memory_that_a_launch_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = cast("Any", KernelModule.__new__(KernelModule))
    module._kernels, module._allowed, allowed = {"k": "kernel", "l": "other"}, {}, list[tuple[str, int]]()

    def allow(self: Any, name: str, shared: int) -> None:
        allowed.append((name, shared))
        self._allowed[name] = shared

    monkeypatch.setattr(KernelModule, "_allow", allow)
    kernels = [module.kernel("k", shared=shared) for shared in (0, 10, 20, 15, 20)]
    assert (module.kernel("l", shared=5), kernels) == ("other", ["kernel"] * 5)
    assert allowed == [("k", 10), ("k", 20), ("l", 5)]


def test_every_dtype_of_a_file_has_its_size() -> None:
    for name, size in DTYPES.values():
        assert size == (np.dtype(name) if name in np.sctypeDict else np.dtype(getattr(ml_dtypes, name))).itemsize, name


@pytest.mark.parametrize(
    ("sizes", "text"), [([1, 1, 1], "1"), ([1, 4, 4], "1-4"), ([1, 2, 4], "1-4 (best 2)"), ([0, 0, 2], "0-2 (best 0)")]
)
def test_a_range_of_a_profile_names_its_best_size_if_it_is_not_the_most(sizes: list[int], text: str) -> None:
    assert summary._range(sizes) == text


def test_the_line_that_ends_an_answer_has_every_figure() -> None:
    speculation = SimpleNamespace(num_spec_tokens=4, mean_acceptance_length=2.5)
    output = SimpleNamespace(
        token_ids=[1] * 6, speculation=speculation, finish_reason="stop", seed=7, forced_ends=1, error=None
    )
    line = figures(cast("Any", output), 2.0, sampled=True)
    for part in ("6 tokens in 2.00 s", "3.0 tokens/s", "2.50 tokens per round", "finish: stop", "seed: 7", "budget"):
        assert part in line


def test_an_answer_is_encoded_without_spaces_and_in_its_own_letters() -> None:
    assert rendering._encode_answer({"a": [1, "é"], "b": None}) == '{"a":[1,"é"],"b":null}'
