"""Contracts that a manifest's sizes imply: layers may have attention, a recurrent state, or both."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandemrt.engines.bundle.implied import require_implied
from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import RecurrentState
from tandemrt.engines.validation.errors import BadBundle
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


def test_a_bundle_of_operators_without_a_sampling_parameter_is_rejected_by_its_name(tmp_path: Path) -> None:
    manifest = write_bundle(tmp_path / "sample").manifest
    verify = manifest.engines["verify"]
    inputs = tuple(binding for binding in verify.contract.inputs if binding.name != "top_n_sigma")
    older = verify.model_copy(update={"contract": replace(verify.contract, inputs=inputs)})
    with pytest.raises(BadBundle, match=r"engines.verify.*input top_n_sigma .* is missing.*Build the bundle again"):
        require_implied(manifest.model_copy(update={"engines": {**manifest.engines, "verify": older}}))
