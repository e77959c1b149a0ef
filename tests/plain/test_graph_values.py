"""What small parts of graphs compute, with operators of numpy in place of nodes."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.export.model import draft_vocabulary
from tandemrt.export.model.dequantized import _by_last_dimension

OPERATORS: dict[str, Any] = {
    "Abs": np.abs,
    "Div": np.divide,
    "Gather": lambda x, indices, axis: np.take(x, indices, axis),
    "Max": np.maximum,
    "Mul": np.multiply,
    "ReduceMax": lambda x, axes, keepdims: x.max(tuple(axes), keepdims=bool(keepdims)),
}


def _cast(x: Any, dtype: str) -> npt.NDArray[Any]:
    return np.asarray(x).astype(getattr(ml_dtypes, dtype) if dtype.startswith("float8") else dtype)


BUILDER: Any = SimpleNamespace(
    op=lambda kind, *inputs, **attributes: OPERATORS[kind](*inputs, **attributes),
    constant=lambda value, dtype="int64": np.asarray(value, dtype),
    cast=_cast,
)


@given(ids=st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True))
def test_logits_of_a_draft_are_in_the_order_of_its_targets_ids(ids: list[int]) -> None:
    """A head may store its tokens in any order. Every token has its own id as logit here."""
    stored = SimpleNamespace(stored=lambda *_: lambda *_: np.array(ids, np.float32)[None, None])
    weights: Any = SimpleNamespace(skip=lambda *_: None)
    spec: Any = SimpleNamespace(draft_vocab=len(ids))
    with patch.multiple(draft_vocabulary, Linear=stored, target_ids=lambda *_: np.array(ids)):
        logits: Any = draft_vocabulary.draft_logits(BUILDER, weights, weights, spec, weights)
    assert logits[0, 0].tolist() == sorted(ids)


@pytest.mark.parametrize("row", [[0.0, 0.0], [1.0, 448.0], [-896.0, 2.0], [1e-30, -1e-30], [0.0, 1e30]], ids=str)
def test_inputs_in_8_bits_are_finite_and_keep_their_largest_value(row: list[float]) -> None:
    rounded: Any = _by_last_dimension(BUILDER, np.array([row, [0.0, 0.0]], np.float32))  # type: ignore[arg-type]
    assert np.isfinite(rounded).all()
    assert not rounded[1].any()
    most = np.abs(row).argmax()
    np.testing.assert_allclose(rounded[0, most], row[most] if abs(row[most]) > 1e-9 else 0.0, rtol=1e-6, atol=1e-29)
