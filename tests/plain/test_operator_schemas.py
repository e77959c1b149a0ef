"""Schemas of operators: their tensors, those that share memory, and those that may be omitted."""

import pytest

from tandemrt.engines.contract.dtypes import ONNX
from tandemrt.engines.contract.operators import SCHEMAS, Schema, T

EVERY = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=list(SCHEMAS))


ROW_DEPENDENT = {  # operators whose results for a token may depend on other tokens of the call
    "token_bitmask",
    "adjust_logits",
    "verify_draft",
    "verify_draft_probs",
    "sample_draft",
    "latent_attention",
    "low_bit_int8_matmul",
    "tiled_matmul",
    "decode_attention",
}
NEEDS_FLOAT8 = {
    "float8_window_attention",
    "float8_matmul",
    "quantize_tokens",
    "scaled_matmul",
    "quantized_swiglu",
    "quantized_norm",
}


def test_these_operators_are_not_batch_invariant_and_these_need_a_gpu_with_float8() -> None:
    assert {schema.name for schema in SCHEMAS.values() if not schema.batch_invariant} == ROW_DEPENDENT
    newer = {
        schema.name: schema.compute_capability for schema in SCHEMAS.values() if schema.compute_capability > (8, 0)
    }
    assert newer == dict.fromkeys(NEEDS_FLOAT8, (8, 9))


@EVERY
def test_every_tensor_has_a_name_of_its_own_and_a_known_dtype(schema: Schema) -> None:
    for bindings in (schema.inputs, schema.outputs):
        names = [binding.name for binding in bindings]
        assert len({*names}) == len(names) > 0
        assert all(name.isidentifier() for name in names)
        assert {binding.dtype for binding in bindings} <= {T, *ONNX}
        assert not {*names} & {T, *ONNX}


@EVERY
def test_an_output_in_place_is_like_the_input_whose_memory_it_shares(schema: Schema) -> None:
    inputs, outputs = ({binding.name: binding for binding in side} for side in (schema.inputs, schema.outputs))
    for output, source in schema.in_place.items():
        assert (outputs[output].dtype, outputs[output].shape) == (inputs[source].dtype, inputs[source].shape)
    assert len({*schema.in_place.values()}) == len(schema.in_place)


@EVERY
def test_tensors_that_may_be_omitted_are_at_the_end_of_their_lists(schema: Schema) -> None:
    omitted = [[binding.name in schema.optional for binding in side] for side in (schema.inputs, schema.outputs)]
    assert all(flags == sorted(flags) for flags in omitted)
    assert sum(map(sum, omitted)) == len(schema.optional)
