"""Adjusted logits: the definition against what others compute, and the engine against the definition."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from tandemrt.engines.contract import contract
from tandemrt.export.model.weightless import build_adjust
from tandemrt.plugins.operators.constants import DOMAIN
from tandemrt.plugins.reference import adjust_logits
from tandemrt.runtime.check.adjust_logits import edge_case_adjust_batch, reference_adjust, run_adjust
from tandemrt.runtime.device.backends.onnxruntime.engine import OnnxRuntimeEngine

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def adjust(logits, *, drafts=(), tokens, counts=0, in_prompt=0, bias=0.0, presence=0, frequency=0, repetition=1):
    """One request over all of ``tokens``; logits [rows, vocab] of any dtype, float32 from a list."""
    rows = np.asarray(logits) if isinstance(logits, np.ndarray) else np.array(logits, np.float32)
    columns = [np.broadcast_to(np.asarray(each), (1, len(tokens))) for each in (tokens, counts, in_prompt, bias)]
    penalties = [[presence], [frequency], [repetition]]
    return adjust_logits(rows[None], np.array([drafts], np.int64), *columns, [len(tokens)], *penalties)[0]


def test_the_repetition_penalty_is_that_of_transformers():
    """Of prompt and output alike, where they are listed; the drafts before a row count as output."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 40)).astype(np.float32)
    prompt, output, drafts = [1, 2, 3, 3], [4, 2, 5], [7, 8]
    tokens = sorted({*prompt, *output, *drafts})
    counts, in_prompt = [output.count(token) for token in tokens], [int(token in prompt) for token in tokens]
    adjusted = adjust(
        logits, drafts=drafts, tokens=tokens, counts=counts, in_prompt=in_prompt, repetition=np.float32(1.3)
    )
    process = RepetitionPenaltyLogitsProcessor(float(np.float32(1.3)))
    for row in range(3):
        text = torch.tensor([prompt + output + drafts[:row]])
        np.testing.assert_array_equal(adjusted[row], process(text, torch.from_numpy(logits[row][None]))[0].numpy())


def test_the_bias_is_that_of_transformers():
    logits = np.random.default_rng(1).normal(size=(1, 40)).astype(np.float32)
    bias = {3: -100.0, 17: 2.5, 39: 100.0}
    process = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected = process(torch.tensor([[0]]), torch.from_numpy(logits))
    np.testing.assert_array_equal(adjust(logits, tokens=[*bias], bias=[*bias.values()]), expected.numpy())


def test_frequency_counts_and_presence_does_not():
    """OpenAI's formula: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence; the prompt plays no part."""
    adjusted = adjust(
        [[1.0, 2.0, 3.0, 4.0]], tokens=[0, 1, 2], counts=[0, 1, 3], in_prompt=[1, 0, 0], frequency=0.5, presence=0.25
    )
    np.testing.assert_array_equal(adjusted, [[1.0, 2.0 - 0.75, 3.0 - 1.75, 4.0]])


def test_a_negative_penalty_rewards():
    assert adjust([[1.0, 2.0]], tokens=[0], counts=2, frequency=-0.5, presence=-1.0)[0, 0] == 3.0


def test_each_row_counts_the_drafts_before_it():
    adjusted = adjust(np.zeros((4, 3), np.float32), drafts=[2, 1, 2], tokens=[1, 2], counts=[5, 0], frequency=1)
    np.testing.assert_array_equal(adjusted[:, 1], [-5, -5, -6, -6])
    np.testing.assert_array_equal(adjusted[:, 2], [0, -1, -1, -2])


def test_bias_comes_before_the_repetition_penalty_and_that_before_the_others():
    """The order of vLLM: a bias may change the sign that the repetition penalty looks at."""
    arguments = {"tokens": [0], "counts": 1, "repetition": 2, "frequency": 0.5, "presence": 0.25}
    assert adjust([[1.0]], bias=-3.0, **arguments)[0, 0] == (1 - 3) * 2 - 0.75
    assert adjust([[-1.0]], bias=3.0, **arguments)[0, 0] == (-1 + 3) / 2 - 0.75


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_stay_unchanged(value):
    adjusted = adjust([[value, 1.0]], tokens=[0, 1], counts=1, bias=7.0, repetition=2, presence=1)
    np.testing.assert_array_equal(adjusted, [[value, 3.0]])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_adjusted_logits_saturate_at_the_largest_number(dtype):
    """Infinite, it would be no number, and could not be drawn."""
    largest = ml_dtypes.finfo(dtype).max
    logits = np.array([[100.0, -100.0]], dtype)
    adjusted = adjust(logits, tokens=[0], counts=1, repetition=np.float32(2.0**-126))
    assert adjusted[0, 0] == largest
    assert adjust(logits, tokens=[1], counts=1, repetition=np.float32(2.0**126))[0, 1] == -largest


def test_the_result_is_rounded_once():
    exact = (1.0 + 0.3) / 1.7 - 0.1
    adjusted = adjust(np.ones((1, 1), ml_dtypes.bfloat16), tokens=[0], counts=1, bias=0.3, repetition=1.7, presence=0.1)
    assert adjusted[0, 0] == ml_dtypes.bfloat16(exact)


def make_case(vocab, window, columns):
    return edge_case_adjust_batch(vocab=vocab, window=window, columns=columns, batch=8, seed=0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder, opened = tmp_path_factory.mktemp("engines"), {}

    def open_engine(vocab, dtype):
        if (vocab, dtype) not in opened:
            path = folder / f"{vocab}-{dtype}.onnx"
            ir.save(build_adjust(vocab=vocab, dtype=dtype), path)
            bindings = contract.adjust(vocab=vocab, dtype=dtype)
            opened[vocab, dtype] = OnnxRuntimeEngine.open(path, bindings, device="cpu", threads=1)
        return opened[vocab, dtype]

    return open_engine


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize(("vocab", "columns"), [(33, 16), (1000, 64), (2049, 300)])
def test_the_engine_gives_the_numbers_of_the_definition_in_place(engine, vocab, columns, window, dtype):
    case = make_case(vocab, window, columns)
    expected = reference_adjust(case, dtype)
    untouched = reference_adjust(case | {"entry_len": np.zeros(8, np.int32)}, dtype)
    assert (np.nan_to_num(expected) != np.nan_to_num(untouched)).any(axis=(1, 2)).sum() >= 6
    np.testing.assert_array_equal(run_adjust(engine(vocab, dtype), case), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-126, 126])
def test_the_engine_stays_within_the_dtype_as_well(engine, dtype, exponent):
    case = make_case(33, 3, 16)
    case["repetition"] = np.full_like(case["repetition"], 2.0**exponent)
    expected, largest = reference_adjust(case, dtype), float(ml_dtypes.finfo(dtype).max)
    assert (expected == (largest if exponent < 0 else -largest)).any()
    np.testing.assert_array_equal(run_adjust(engine(33, dtype), case), expected)


def test_unused_columns_have_no_effect(engine):
    """Not even where they repeat a token that is: its logit is written once."""
    case = make_case(33, 3, 16)
    expected = reference_adjust(case, "float32")
    unused = np.arange(16) >= case["entry_len"][:, None]
    for name, rubbish in (("entry_tokens", 2**30), ("entry_counts", -7), ("entry_in_prompt", 5), ("entry_bias", 50)):
        case[name] = np.where(unused, rubbish, case[name]).astype(case[name].dtype)
    np.testing.assert_array_equal(run_adjust(engine(33, "float32"), case), expected)
    case["entry_tokens"] = np.where(unused, case["entry_tokens"][:, :1], case["entry_tokens"])
    np.testing.assert_array_equal(run_adjust(engine(33, "float32"), case), expected)


def test_batch_mates_and_unused_width_change_nothing(engine):
    case = make_case(1000, 4, 64)
    together = run_adjust(engine(1000, "float16"), case)
    for i in range(len(together)):
        alone = {name: values[i : i + 1] for name, values in case.items()}
        width = max(1, case["entry_len"][i])
        cut = {name: values[:, :width] if values.shape[1:] == (64,) else values for name, values in alone.items()}
        np.testing.assert_array_equal(
            run_adjust(engine(1000, "float16"), {n: np.ascontiguousarray(v) for n, v in cut.items()})[0], together[i]
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model_is_standard_onnx_that_carries_its_function(dtype):
    model = ir.to_proto(build_adjust(vocab=100, dtype=dtype))
    onnx.checker.check_model(model, full_check=True)
    assert [function.name for function in model.functions] == ["adjust_logits"]
    assert {node.domain for node in model.graph.node} == {DOMAIN}
    assert {node.domain for node in model.functions[0].node} == {""}
