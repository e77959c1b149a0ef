"""How the runtime drives a TensorRT engine: contexts, addresses, memory, and a refusal whenever a run is not one."""

from types import SimpleNamespace

import pytest
import torch

from tandemrt.engines.bundle.manifest import EngineEntry
from tandemrt.engines.validation.errors import BackendUnavailable, BadBundle, InternalError
from tandemrt.runtime.device.backends.base import ProfiledEngine
from tandemrt.runtime.device.backends.tensorrt import contexts
from tandemrt.runtime.device.backends.tensorrt import engine as backend
from tandemrt.runtime.device.backends.tensorrt import open as tensorrt_open
from tandemrt.runtime.device.backends.tensorrt.open import deserialize, require_bindings
from tests.plain.stand_in_tensorrt import CAPACITY, CONTRACT, MEMORY, RTX, TENSORRT, VOCAB, Engine, Runtime

CPU = torch.device("cpu")


class Log:
    def __init__(self):
        self.errors = []

    def clear(self):
        self.errors.clear()

    def summary(self):
        return "; ".join(self.errors)


@pytest.fixture
def state(monkeypatch, tmp_path):
    """The device as torch describes it, and what TensorRT has said."""
    state = SimpleNamespace(capturing=False, free=1 << 20, log=Log())
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (state.free, 1 << 30))
    monkeypatch.setattr(contexts, "logger", lambda _: state.log)
    return state


def opened(state, module=TENSORRT, **departures):
    engine = Engine(state.log, **departures)
    narrow = require_bindings("target", engine, CONTRACT)
    tensorrt_engine = backend.TensorRtEngine(
        SimpleNamespace(**module), engine, "target", CONTRACT, CPU, key="0" * 64, narrow=narrow
    )
    return engine, tensorrt_engine


def tensors(batch, query, first=10):
    return {
        "token_ids": torch.arange(first, first + batch * query).view(batch, query),
        "write_index": torch.arange(batch),
        "past_key.0": torch.zeros(batch, CAPACITY),
        "logits": torch.full((batch, query, VOCAB), -1.0),
    }


def check(bound):
    batch, query = bound["token_ids"].shape
    assert torch.equal(bound["logits"], (bound["token_ids"] + 0.5).float()[..., None].expand(batch, query, VOCAB))
    for row in range(batch):
        assert torch.equal(bound["past_key.0"][row, row : row + query], bound["token_ids"][row].float())


def test_a_run_writes_what_was_bound_and_the_cache_in_place(state):
    _, engine = opened(state)
    bound = tensors(2, 3)
    engine.bind(bound).run()
    check(bound)


def test_an_engine_without_int64_reads_the_present_values_of_int64_inputs(state):
    _, engine = opened(state, narrow=True)
    bound = tensors(2, 3)
    call = engine.bind(bound)
    for first in (10, 50):
        bound["token_ids"] += first
        bound["write_index"] += 1
        call.run()
        assert torch.equal(bound["logits"][..., 0], bound["token_ids"] + 0.5)
        for row in range(2):
            begin = int(bound["write_index"][row])
            assert torch.equal(bound["past_key.0"][row, begin : begin + 3], bound["token_ids"][row].float())


def test_an_engine_that_has_int64_as_pairs_reads_the_tensors_themselves(state):
    real, engine = opened(state, pairs=True)
    bound = tensors(2, 3, first=2**40)
    call = engine.bind(bound)
    bound["token_ids"] += 1
    call.run()
    assert torch.equal(bound["logits"][..., 0], (bound["token_ids"] + 0.5).float())
    assert real.contexts[0].shapes["token_ids"] == (2, 3, 2)
    assert real.contexts[0].addresses["token_ids"] == bound["token_ids"].data_ptr()


def test_an_engine_that_reports_no_aliases_is_accepted_if_its_updates_may_be_in_place(state):
    assert require_bindings("target", Engine(state.log, in_place=False), CONTRACT, reports_aliases=False) == ()
    narrow = require_bindings("target", Engine(state.log, in_place=False, narrow=True), CONTRACT, reports_aliases=False)
    assert narrow == ("token_ids", "write_index")


def test_calls_of_the_same_shapes_share_a_context_and_keep_to_their_own_tensors(state):
    real, engine = opened(state)
    bound = [tensors(2, 3, first) for first in (10, 50)]
    calls = [engine.bind(each) for each in bound]
    for index in (0, 1, 0, 0, 1):
        bound[index]["logits"].fill_(-1)
        calls[index].run()
        check(bound[index])
    assert len(real.contexts) == 1


def test_a_call_gets_a_context_of_the_profile_tuned_closest(state):
    real, engine = opened(state)
    for shape in ((1, 6), (4, 3), (3, 3), (1, 5)):
        bound = tensors(*shape)
        engine.bind(bound).run()
        check(bound)
    assert [context.profile for context in real.contexts] == [0, 1, 1, 0]


def test_the_least_recently_used_context_of_a_profile_gets_the_shapes_of_a_new_call(state):
    real, engine = opened(state)
    bound = {shape: tensors(*shape) for shape in ((1, 6), (1, 5), (1, 4), (2, 3), (3, 3), (4, 3))}
    calls = {shape: engine.bind(of_shape) for shape, of_shape in bound.items()}
    for shape in (*calls, (1, 5), (1, 5), (1, 6)):
        bound[shape]["logits"].fill_(-1)
        calls[shape].run()
        check(bound[shape])
    assert sorted(context.profile for context in real.contexts) == [0, 0, 1, 1]


def test_a_context_that_a_graph_recorded_keeps_its_shapes(state):
    """A phase calls an engine with two shapes of a profile: all warm-up runs come before the capture."""
    real, engine = opened(state)
    phase = [engine.bind(tensors(*shape)) for shape in ((2, 3), (3, 3))]
    for capturing in (False, False, True):
        state.capturing = capturing
        for call in phase:
            call.run()
    state.capturing = False
    for shape in ((4, 3), (3, 3), (4, 2), (2, 3), (2, 2)):
        bound = tensors(*shape)
        engine.bind(bound).run()
        check(bound)
    assert [context.shapes["token_ids"] for context in real.contexts] == [(2, 3), (3, 3), (2, 2), (4, 2)]


def test_a_context_with_new_shapes_must_run_before_it_is_recorded(state):
    _, engine = opened(state)
    first, *others = (engine.bind(tensors(*shape)) for shape in ((2, 3), (3, 3), (4, 3)))
    first.run()
    for call in others:
        call.run()
    state.capturing = True
    with pytest.raises(InternalError, match="run once before capture"):
        first.run()


def test_the_planner_gives_the_engine_one_prompt_per_call(state):
    _, engine = opened(state)
    assert isinstance(engine, ProfiledEngine)


def test_all_contexts_share_one_allocation(state):
    real, engine = opened(state)
    for shape in ((1, 6), (4, 3)):
        engine.bind(tensors(*shape)).run()
    assert {context.memory[0] for context in real.contexts} == {engine._contexts._scratch.block.data_ptr()}
    assert [context.memory[1] for context in real.contexts] == [MEMORY, MEMORY]
    assert [context.how for context in real.contexts] == ["user managed", "user managed"]


def test_a_run_that_is_refused_is_no_answer(state):
    real, engine = opened(state)
    call = engine.bind(tensors(2, 3))
    real.contexts[0].refuses = True
    with pytest.raises(InternalError, match="engine 'target': TensorRT rejected the run: no such kernel"):
        call.run()


def test_the_first_run_must_not_be_captured_and_later_ones_may(state):
    real, engine = opened(state)
    call = engine.bind(tensors(2, 3))
    state.capturing = True
    with pytest.raises(InternalError, match="run once before capture"):
        call.run()
    assert real.contexts[0].runs == 0
    state.capturing = False
    call.run()
    state.capturing = True
    call.run()
    assert real.contexts[0].runs == 2


def test_shapes_without_a_profile_raise_an_internal_error(state):
    _, engine = opened(state)
    with pytest.raises(InternalError, match="no profile takes"):
        engine.bind(tensors(4, 7))


def test_memory_for_the_contexts_must_be_free(state):
    state.free = MEMORY - 1
    with pytest.raises(BackendUnavailable, match="scratch memory of engine target"):
        opened(state)


@pytest.mark.parametrize(
    ("departure", "message"),
    [
        ({"in_place": False}, r"present_key\.0 does not update past_key\.0 in place"),
        ({"host": ("write_index",)}, "write_index is read in host memory"),
        ({"dtype": "HALF"}, r"input past_key\.0 float16.* should be past_key\.0 float32"),
    ],
)
def test_an_engine_that_departs_from_the_contract_is_refused(state, departure, message):
    require_bindings("target", Engine(state.log), CONTRACT)
    with pytest.raises(BadBundle, match=message):
        require_bindings("target", Engine(state.log, **departure), CONTRACT)


@pytest.mark.parametrize(("capturable", "graphs"), [(True, ["disabled"]), (False, ["disabled", "whole"])])
def test_tensorrt_rtx_replays_graphs_of_its_own_where_the_runtime_cannot_capture(state, tmp_path, capturable, graphs):
    real, engine = opened(state, TENSORRT | RTX, capturable=capturable)
    bound = tensors(2, 3)
    engine.bind(bound).run()
    check(bound)
    assert engine.capturable is capturable
    assert [context.how.cuda_graph_strategy for context in real.contexts] == graphs
    assert {context.how.strategy for context in real.contexts} == {"user managed"}
    del engine
    (file,) = tmp_path.rglob("*.kernels")
    assert file.read_bytes() == b"kernels", "what was compiled is kept for the next start"


def test_only_an_engine_of_tensorrt_may_hold_code_that_opens_it_in_later_releases(state, monkeypatch, tmp_path):
    monkeypatch.setattr(tensorrt_open, "logger", lambda _: state.log)
    file = tmp_path / "model.engine"
    file.write_bytes(b"plan")
    module = SimpleNamespace(__version__="1", Runtime=Runtime)
    entry = EngineEntry(file=file.name, backend="tensorrt", built_for="sm_90", dtype="float16", contract=CONTRACT)
    assert deserialize(module, "target", entry, file) == b"plan"
    with pytest.raises(BackendUnavailable, match=r"cannot open model\.engine, .* holds code that may not be run"):
        deserialize(module, "target", entry.model_copy(update={"backend": "tensorrt-rtx"}), file)
