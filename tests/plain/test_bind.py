"""Tensors that violate an engine's contract are rejected before the engine runs."""

import pytest
import torch

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.device.backends.base import check_tensors

CPU = torch.device("cpu")
CONTRACT = Contract(
    (Binding("token_ids", "int64", ("batch", "query")), Binding("past_key", "float32", ("batch", 2, 8))),
    (Binding("logits", "float32", ("batch", 9)), Binding("present_key", "float32", ("batch", 2, 8))),
    (("present_key", "past_key"),),
)


def tensors() -> dict[str, torch.Tensor]:
    return {
        "token_ids": torch.zeros(3, 5, dtype=torch.int64),
        "past_key": torch.zeros(3, 2, 8),
        "logits": torch.zeros(3, 9),
    }


def test_symbolic_dimensions_take_their_size_from_the_tensors() -> None:
    assert check_tensors(CONTRACT, tensors(), CPU) == {"batch": 3, "query": 5}


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("token_ids", torch.zeros(3, 5), r"token_ids.* received torch.float32\[3, 5\]"),
        ("token_ids", torch.zeros(15, dtype=torch.int64), r"token_ids.* received torch.int64\[15\]"),
        ("logits", torch.zeros(9, 3).T, "logits.* must be contiguous and on cpu"),
        ("logits", torch.zeros(3, 9, device="meta"), "logits.* must be contiguous and on cpu, received meta"),
        ("logits", torch.zeros(4, 9), r"logits.* must have batch = 3, received \[4, 9\]"),
        ("logits", torch.zeros(2, 9), r"logits.* must have batch = 3, received \[2, 9\]"),
        ("past_key", torch.zeros(3, 2, 9), r"past_key.* must have 8 = 8, received \[3, 2, 9\]"),
        ("present_key", torch.zeros(3, 2, 8), r"\['present_key'\] are not bindings"),
    ],
)
def test_a_tensor_that_violates_the_contract_is_named(name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        check_tensors(CONTRACT, tensors() | {name: tensor}, CPU)


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(InternalError, match=r"bind: logits.* is missing"):
        check_tensors(CONTRACT, {name: tensor for name, tensor in tensors().items() if name != "logits"}, CPU)
