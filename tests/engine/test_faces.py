"""All operators, all faces: each says what the one table says, and computes what the definition computes."""

import inspect
from importlib import import_module

import pytest
import torch

from tandemrt.engines.operators import SCHEMAS
from tandemrt.plugins.faces import FACES, function, launcher, plugins, reference
from tandemrt.plugins.kernels.compile import kernel_names
from tandemrt.plugins.launch import Context
from tests.engine.face_cases import LARGEST, cases, hold

CPU = Context(torch.device("cpu"), threads=1, sizes=LARGEST)
each_operator = pytest.mark.parametrize("operator", SCHEMAS)


def test_every_operator_of_the_table_has_its_faces_and_no_other_has() -> None:
    assert list(FACES) == list(SCHEMAS)
    assert {schema.kernels for schema in SCHEMAS.values() if schema.kernels} == set(kernel_names())


@each_operator
def test_the_function_has_the_inputs_outputs_and_attributes_of_the_table(operator: str) -> None:
    schema = SCHEMAS[operator]
    for given in (schema.optional, ()):
        body = function(operator)("float16", given)[0]
        left_out = set(schema.optional) - set(given)
        assert body.name == operator
        assert [v.name for v in body.inputs] == [b.name for b in schema.inputs if b.name not in left_out]
        assert [v.name for v in body.outputs] == [b.name for b in schema.outputs if b.name not in left_out]
        assert set(body.attributes) <= set(schema.attributes)
    assert set(function(operator)("float16", schema.optional)[0].attributes) == set(schema.attributes)


@each_operator
def test_the_definition_takes_what_the_table_says_by_name(operator: str) -> None:
    schema, parameters = SCHEMAS[operator], inspect.signature(reference(operator)).parameters
    names = {binding.name for binding in schema.inputs} | set(schema.attributes)
    assert names <= set(parameters)
    assert {name for name, each in parameters.items() if each.default is each.empty} <= names - set(schema.optional)


def test_a_plugin_is_the_operator_of_its_name() -> None:
    assert {plugin.name for plugin in plugins()} == {name for name, faces in FACES.items() if faces.tensorrt}


@pytest.mark.parametrize("operator", [name for name, faces in FACES.items() if faces.cuda])
def test_every_launcher_has_the_one_signature(operator: str) -> None:
    module, _, name = str(FACES[operator].cuda).partition(":")
    launch = getattr(import_module(f"tandemrt.plugins.{module}"), name)
    assert list(inspect.signature(launch).parameters) == ["tensors", "attributes", "context"]


@each_operator
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_face_on_a_cpu_equals_the_definition(operator: str, dtype: str) -> None:
    for case in cases(operator, dtype):
        hold(operator, case, CPU)


def test_calls_of_one_kind_share_a_session_and_others_do_not() -> None:
    context = Context(torch.device("cpu"), threads=1)
    bind = launcher("swiglu", context)
    for dtype, shape in ((torch.float32, (1, 2, 6)), (torch.float32, (4, 5, 32)), (torch.float16, (1, 2, 6))):
        tensors = {"gate_up": torch.ones(shape, dtype=dtype)}
        bind({**tensors, "activated": torch.empty(*shape[:-1], shape[-1] // 2, dtype=dtype)}, {}, context).run()
    assert len(context._kept) == 2
