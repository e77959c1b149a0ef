"""Contracts that a manifest's sizes imply: layers may have attention, a recurrent state, or both."""

from pathlib import Path

import pytest

from tandemrt.engines.bundle.implied import require_implied
from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import RecurrentState
from tests.plain.test_bundle import write_bundle

STATE = RecurrentState((2, 8, 16), 40)


@pytest.mark.parametrize("attention", [(0,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("recurrent", [(), (1,), (1, 2)])
def test_a_layer_with_attention_and_a_state_counts_once(
    tmp_path: Path, attention: tuple[int, ...], recurrent: tuple[int, ...]
) -> None:
    manifest = write_bundle(tmp_path / "sample").manifest
    decoder = contract.decoder(
        layers=len({*attention, *recurrent}),
        kv_heads=2,
        head_dim=8,
        capacity=37,
        vocab=96,
        dtype="float32",
        heads=dict.fromkeys(attention, (2, 8)),
        recurrent=dict.fromkeys(recurrent, STATE),
        history=7 if recurrent else 0,
    )
    target = manifest.engines["target"].model_copy(update={"contract": decoder})
    require_implied(manifest.model_copy(update={"engines": {**manifest.engines, "target": target}}))
