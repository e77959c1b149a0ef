"""The plugins in TensorRT's own code: registration, validation, shapes, launches and kernels."""

import inspect
import re
import sys

import pytest
import tensorrt as trt
import tensorrt.plugin as trtp

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.dtypes import KERNEL_SUFFIX
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.export.model.weightless import build_verify
from tandemrt.plugins.operators.constants import DOMAIN
from tandemrt.plugins.tensorrt import register
from tandemrt.plugins.tensorrt.operators import PLUGINS
from tests.tensorrt.tracing import create, trace

KINDS = {
    "float32": trt.DataType.FLOAT,
    "float16": trt.DataType.HALF,
    "bfloat16": trt.DataType.BF16,
    "int32": trt.DataType.INT32,
    "int64": trt.DataType.INT64,
}
VOCAB = 128_256
SIZES = [{"batch": 1, "rows": 1}, {"batch": 3, "rows": 5}, {"batch": 64, "rows": 9}]
OPERATORS = PLUGINS
each_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
each_dtype = pytest.mark.parametrize("dtype", KERNEL_SUFFIX)


@pytest.fixture(scope="module", autouse=True)
def registered():
    register.register(OPERATORS)


def arguments(operator, dtype="bfloat16", vocab=VOCAB):
    """Return (TensorRT's dtype, symbolic shape) of every input, from the contract."""
    bindings = contract.verify(vocab=vocab, dtype=dtype, draft_probs=True)
    shapes = [[{"window+1": "rows"}.get(dim, dim) for dim in bindings[each.name].shape] for each in operator.inputs]
    return [(KINDS[bindings[b.name].dtype], tuple(shape)) for b, shape in zip(operator.inputs, shapes, strict=True)]


def evaluated(record, sizes):
    return {name: each.source.evaluate(sizes) for name, each in vars(record).items() if hasattr(each, "source")}


def entry_parameters(ptx, entry):
    """Return the PTX types of a kernel's parameters, in order."""
    match = re.search(rf"\.entry {entry}\((.*?)\)", ptx, re.DOTALL)
    assert match, f"no entry {entry}"
    return re.findall(r"\.param \.(\w+)", match[1])


@each_operator
def test_an_operator_is_a_version_1_plugin_of_the_namespace_without_attributes(operator):
    creator = trt.get_plugin_registry().get_creator(operator.name, "1", DOMAIN)
    assert (creator.name, creator.plugin_version, creator.plugin_namespace) == (operator.name, "1", DOMAIN)
    assert len(creator.field_names) == 0


@each_operator
@pytest.mark.parametrize("request_", ["UNKNOWN", "PREFER_AOT", "PREFER_JIT", "STRICT_AOT"])
def test_the_plugin_is_compiled_ahead_of_time_for_any_network_preference(operator, request_):
    """A node without the attribute ``aot`` in a network without flags requests UNKNOWN."""
    assert isinstance(create(operator.name, request=request_), trt.IPluginV3QuickAOTBuild)


@each_operator
def test_an_engine_never_calls_back_into_python(operator):
    with pytest.raises(ValueError, match="JIT implementation requested, but not defined"):
        create(operator.name, request="STRICT_JIT")


@each_dtype
@each_operator
def test_outputs_have_the_shapes_and_dtypes_of_the_contract(operator, dtype):
    answers = trace(create(operator.name), arguments(operator, dtype))
    verified = contract.verify(vocab=VOCAB, dtype=dtype, draft_probs=True)
    expected = [verified["logits"]] if operator.name == "token_bitmask" else verified.outputs
    assert answers.output_types == [KINDS[binding.dtype] for binding in expected]
    for sizes in SIZES:
        shapes = [tuple(dim.evaluate(sizes) for dim in shape) for shape in answers.output_shapes]
        assert shapes == [b.resolve(sizes | {"window+1": sizes["rows"]}) for b in expected]


@each_dtype
@each_operator
def test_every_tensor_is_linear_and_of_its_own_dtype(operator, dtype):
    inputs = arguments(operator, dtype)
    answers = trace(create(operator.name), inputs)
    assert [each.type for each in answers.formats] == [kind for kind, _ in inputs] + answers.output_types
    assert {each.format for each in answers.formats} == {trt.TensorFormat.LINEAR}


@each_operator
def test_the_launch_follows_the_shapes_of_the_call(operator):
    """The engine evaluates the same expressions that a launch with concrete shapes gets."""
    inputs = arguments(operator)
    answers = trace(create(operator.name), inputs)
    for sizes in SIZES:
        symbols = sizes | {"window": sizes["rows"] - 1}
        shapes = [tuple(symbols.get(dim, dim) for dim in shape) for _, shape in inputs]
        launch = operator.launch({b.name: shape for b, shape in zip(operator.inputs, shapes, strict=True)})
        values = evaluated(answers.launch, sizes)
        assert (values["grid_x"], values["grid_y"], values["grid_z"]) == launch.grid
        assert (values["block_x"], values["block_y"], values["block_z"]) == (launch.threads, 1, 1)
        assert values["shared_mem"] == 0
        assert [each.source.evaluate(sizes) for each in answers.scalars.items.values()] == list(launch.scalars)


def test_the_bitmask_covers_every_word_of_every_row():
    operator = OPERATORS[0]
    for vocab in (1, 31, 32, 33, 2048, 2049, VOCAB):
        launch = operator.launch({"logits": (3, 5, vocab)})
        assert launch.grid[1:] == (15, 1)
        assert launch.grid[0] * launch.threads * 8 >= vocab > (launch.grid[0] - 1) * launch.threads * 8


@each_dtype
@each_operator
def test_the_kernel_takes_inputs_then_int32_scalars_then_outputs(operator, dtype):
    """TensorRT passes an address per tensor, and every scalar expression by value."""
    answers = trace(create(operator.name), arguments(operator, dtype))
    scalars = answers.scalars.nbSymExprs
    assert all(each.kind is trtp.SymInt32 for each in answers.scalars.items.values())
    expected = ["u64"] * len(operator.inputs) + ["u32"] * scalars + ["u64"] * len(operator.outputs)
    assert entry_parameters(answers.code.decode(), answers.kernel) == expected


@each_operator
def test_an_engine_gets_one_kernel_for_every_gpu_since_ampere(operator):
    ptx = operator.ptx("bfloat16")
    assert ".target sm_80\n" in ptx
    assert ptx.count(".entry") == 1


@each_operator
def test_a_tensor_of_another_dtype_is_rejected_by_name(operator):
    for place, binding in enumerate(operator.inputs):
        inputs = arguments(operator)
        inputs[place] = (trt.DataType.INT8, inputs[place][1])
        with pytest.raises(ValueError, match=f"{operator.name}: {binding.name} must be .*, got "):
            trace(create(operator.name), inputs)


@each_operator
def test_a_tensor_of_another_rank_is_rejected_by_name(operator):
    for place, binding in enumerate(operator.inputs):
        inputs = arguments(operator)
        inputs[place] = (inputs[place][0], ("batch", *inputs[place][1]))
        with pytest.raises(ValueError, match=f"{operator.name}: {binding.name} must be .* {len(binding.shape)} dim"):
            trace(create(operator.name), inputs)


@each_operator
def test_tensorrt_rejects_an_implementation_of_another_signature(operator):
    """Control: registration fails if an input is missing."""
    implementation = trtp._lib.QDP_REGISTRY[f"{DOMAIN}::{operator.name}"].aot_impl_func

    def without_an_input(*_): ...

    signature = inspect.signature(implementation)
    without_an_input.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    with pytest.raises(ValueError, match="does not match the expected input arg schema"):
        trtp.aot_impl(f"{DOMAIN}::{operator.name}")(without_an_input)


def test_registering_twice_changes_nothing():
    before = dict(vars(trtp.op.tandemrt))
    register.register(OPERATORS)
    assert dict(vars(trtp.op.tandemrt)) == before


@pytest.mark.parametrize("draft_probs", [True, False])
@pytest.mark.parametrize("dtype", KERNEL_SUFFIX)
def test_every_node_of_the_verify_graph_is_a_plugin_with_these_inputs(dtype, draft_probs):
    graph = build_verify(vocab=1000, dtype=dtype, draft_probs=draft_probs).graph
    assert [node.domain for node in graph] == [DOMAIN, DOMAIN]
    known = {operator.name: operator for operator in OPERATORS}
    for node in graph:
        operator = known[node.op_type]
        assert [value.name for value in node.inputs][1:] == [binding.name for binding in operator.inputs][1:]
        assert operator.inputs[0].name == "logits"
        assert len(node.outputs) == len(operator.outputs)
        assert {name: each.value for name, each in node.attributes.items()} == {"plugin_namespace": DOMAIN}


def test_without_tensorrt_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'tandemrt\[tensorrt\]'"):
        register.register(OPERATORS)


def test_a_tensorrt_of_another_major_version_is_rejected(monkeypatch):
    monkeypatch.setattr(trt, "__version__", "10.14.1.48")
    with pytest.raises(BackendUnavailable, match=r"must be version 11 \(tested: .*11\.4\); got 10\.14\.1\.48"):
        register.register(OPERATORS)
