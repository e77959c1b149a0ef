"""The graphs of a layer that predicts tokens further on against its definition, in every form it is published in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandemrt.engines.errors import BadCheckpoint
from tandemrt.export.model.mtp import build_mtp, build_state_norm
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.mtp import MtpSpec
from tandemrt.export.read.spec import ModelSpec
from tests.engine.test_eagle3_graphs import CAPACITY, STEPS, TARGET, VOCAB, Exported
from tests.heads import Draw
from tests.mtp import FORMS, Definition, MtpLayer

SHARED = {"embed_tokens.weight": Draw(9).matrix(VOCAB, 32) * 4, "lm_head.weight": Draw(8).matrix(VOCAB, 32)}


def read(folder: Path, form: str, **changes: Any) -> tuple[MtpSpec, Checkpoint, MtpLayer]:
    """A checkpoint of the layer in ``form``, what is read of it; ``changes`` of its config."""
    layer = MtpLayer(hidden=32, target_layers=8, heads=2, kv_heads=2, form=form)
    weights = layer.weights()
    copies = {f"{layer.prefix}.shared_head.head.weight": torch.zeros(VOCAB, 32)} if form == "deepseek" else {}
    save_file(weights | copies, folder / "model.safetensors")
    config: dict[str, Any] = TARGET | {"num_nextn_predict_layers": 1, "intermediate_size": 64}
    if form == "speculators":
        config = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1, "transformer_layer_config": config}
        del config["transformer_layer_config"]["num_nextn_predict_layers"]
    (folder / "config.json").write_text(json.dumps(config | changes))
    target = ModelSpec.from_hf(TARGET | {"intermediate_size": 64})
    return *MtpSpec.from_checkpoint(Checkpoint.open(folder), target), layer


def renamed(folder: Path, checkpoint: Checkpoint, layer: MtpLayer) -> Checkpoint:
    """As a build writes it: the layer's tensors by their new names, beside the target's."""
    weights = layer.weights()
    stored = {t.offset: name for name, t in checkpoint.tensors.items()}
    found = {stored[t.offset]: weights[n] for n, t in Checkpoint.open(folder).tensors.items() if n in weights}
    save_file(found | SHARED, folder / "model.safetensors")
    return Checkpoint.open(folder)


@pytest.mark.parametrize("form", FORMS)
def test_more_tokens_than_layers_are_those_of_the_definition(tmp_path: Path, form: str) -> None:
    spec, checkpoint, layer = read(tmp_path, form)
    defined = Definition(layer, layer.weights(), *SHARED.values())
    written = renamed(tmp_path, checkpoint, layer)
    head = build_mtp(spec, written, dtype="float32", capacity=CAPACITY, attention="grouped")
    exported = Exported(tmp_path, spec, build_state_norm(spec, written, dtype="float32"), head)
    text = torch.randint(VOCAB, (24,), generator=torch.Generator().manual_seed(5))
    features = torch.randn(24, 32, generator=torch.Generator().manual_seed(6))
    states, begin = exported.fuse(features), 0
    for accepted in (9, 1, 4):
        end = begin + accepted
        found, state = exported(text[begin + 1 : end + 1], states[begin:end], begin, accepted - 1)
        defined.keep(begin)
        expected, fed_back = (each[-1:] for each in defined(text[begin + 1 : end + 1], features[begin:end]))
        for step in range(STEPS):
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)  # the last norm has one large number
            token = expected.argmax(-1)
            if step < STEPS - 1:
                found, state = exported(token, state, end + step, 0)
                expected, fed_back = defined(token, fed_back)
        begin = end


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("deepseek", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers should be 1, it is 2"),
        ("deepseek", {"num_nextn_predict_layers": None}, "num_nextn_predict_layers should be 1, it is None"),
        ("deepseek", {"num_hidden_layers": 7}, "num_hidden_layers should be the target's, 8, it is 7"),
        ("deepseek", {"quantization_config": {"quant_method": "fp8"}}, "must come with whole weights"),
        ("speculators", {"num_nextn_predict_layers": 3}, "num_nextn_predict_layers is 3, which the exporter does not"),
        ("speculators", {"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3', which the"),
        ("speculators", {"draft_vocab_size": 3}, "the field(s) 'draft_vocab_size'"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path, form: str, changes: Any, message: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(tmp_path, form, **changes)
    assert message in str(caught.value)


def test_a_tensor_of_nobody_is_refused_in_a_checkpoint_of_the_layer_alone(tmp_path: Path) -> None:
    _, checkpoint, layer = read(tmp_path, "speculators")
    copies = {"verifier_lm_head.weight": torch.full((2, 2), float("nan"))}
    save_file(layer.weights() | copies, tmp_path / "model.safetensors")
    target = ModelSpec.from_hf(TARGET | {"intermediate_size": 64})
    assert MtpSpec.from_checkpoint(Checkpoint.open(tmp_path), target)[1].tensors.keys() == checkpoint.tensors.keys()
    save_file(layer.weights() | {"mtp_layers.1.norm.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"tensor 'mtp_layers\.1\.norm\.weight' has no place in such a layer"):
        MtpSpec.from_checkpoint(Checkpoint.open(tmp_path), target)


def test_a_checkpoint_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    save_file({"model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TARGET | {"num_nextn_predict_layers": 1}))
    with pytest.raises(
        BadCheckpoint, match=r"should hold tensors 'model\.layers\.8\.\*' or 'model\.mtp_layers\.0\.\*'"
    ):
        MtpSpec.from_checkpoint(Checkpoint.open(tmp_path), ModelSpec.from_hf(TARGET))
