"""All implementations of all operators match their schema and compute the reference result."""

import inspect
from importlib import import_module

import pytest
import torch

from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.engines.contract.sampling_parameters import SAMPLING_PARAMETERS
from tandemrt.plugins.implementations import IMPLEMENTATIONS, function, launcher, reference
from tandemrt.plugins.kernels.compile import kernel_names
from tandemrt.plugins.operators.constants import IMAGE_ATTENTION_KERNELS
from tandemrt.plugins.operators.launch import Context
from tests.engine.implementation_cases import LARGEST, cases, hold

CPU = Context(torch.device("cpu"), threads=1, sizes=LARGEST)
each_operator = pytest.mark.parametrize("operator", SCHEMAS)
each_function = pytest.mark.parametrize("operator", [name for name, row in IMPLEMENTATIONS.items() if row.function])


def test_every_schema_has_implementations_and_no_other_operator_does() -> None:
    assert list(IMPLEMENTATIONS) == list(SCHEMAS)
    files = {schema.kernels for schema in SCHEMAS.values() if schema.kernels}
    assert files | {IMAGE_ATTENTION_KERNELS} == set(kernel_names())  # window_attention has two files


@each_function
def test_the_function_has_the_inputs_outputs_and_attributes_of_its_schema(operator: str) -> None:
    schema = SCHEMAS[operator]
    for present in (schema.optional, ()):
        body = function(operator)("float16", present)[0]
        left_out = set(schema.optional) - set(present)
        assert body.name == operator
        assert [v.name for v in body.inputs] == [b.name for b in schema.inputs if b.name not in left_out]
        assert [v.name for v in body.outputs] == [b.name for b in schema.outputs if b.name not in left_out]
        assert set(body.attributes) <= set(schema.attributes)
    assert set(function(operator)("float16", schema.optional)[0].attributes) == set(schema.attributes)


@each_operator
def test_the_reference_takes_the_arguments_of_its_schema_by_name(operator: str) -> None:
    schema, parameters = SCHEMAS[operator], inspect.signature(reference(operator)).parameters
    names = {binding.name for binding in schema.inputs} | set(schema.attributes)
    of_sampling = parameters.get("sampling")  # the parameters of the table
    taken = set(parameters) | (set(SAMPLING_PARAMETERS) if of_sampling else set())
    required = {name for name, each in parameters.items() if each.default is each.empty and each is not of_sampling}
    assert names <= taken
    assert required <= names - set(schema.optional)


@pytest.mark.parametrize("operator", [name for name, row in IMPLEMENTATIONS.items() if row.cuda])
def test_every_launcher_has_the_one_signature(operator: str) -> None:
    module, _, name = str(IMPLEMENTATIONS[operator].cuda).partition(":")
    launch = getattr(import_module(f"tandemrt.plugins.{module}"), name)
    assert list(inspect.signature(launch).parameters) == ["tensors", "attributes", "context"]


@each_operator
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_cpu_implementation_equals_the_reference(operator: str, dtype: str) -> None:
    for case in cases(operator, dtype):
        hold(operator, case, CPU)


def test_calls_of_one_kind_share_a_session_and_others_do_not() -> None:
    context = Context(torch.device("cpu"), threads=1)
    bind = launcher("swiglu", context)
    for dtype, shape in ((torch.float32, (1, 2, 6)), (torch.float32, (4, 5, 32)), (torch.float16, (1, 2, 6))):
        tensors = {"gate_up": torch.ones(shape, dtype=dtype)}
        bind({**tensors, "activated": torch.empty(*shape[:-1], shape[-1] // 2, dtype=dtype)}, {}, context).run()
    assert len(context._cached) == 2
