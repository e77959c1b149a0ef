"""Draft heads of hybrid targets: MTP layers of Qwen3.5 against transformers' layer, and EAGLE-3 heads, in texts."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextConfig,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.bundle.build import build
from tandemrt.export.model.mtp import build_mtp, build_state_norm
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor, read_header
from tandemrt.export.read.mtp import MtpSpec
from tandemrt.export.read.spec import ModelSpec
from tests import eagle3
from tests.engine.decoding import fused
from tests.engine.test_eagle3_graphs import CAPACITY, Exported
from tests.engine.test_invisible import output_of, outputs
from tests.heads import Draw
from tests.makers import tiny_hybrid, write_recipe


class MtpOfQwen(torch.nn.Module):
    """The MTP layer of Qwen3.5 around transformers' decoder layer with full attention, for one text."""

    def __init__(self, config: Qwen3_5TextConfig, seed: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        of_type = Qwen3_5MoeDecoderLayer if config.model_type == "qwen3_5_moe_text" else Qwen3_5DecoderLayer
        self.layers = torch.nn.ModuleList([of_type(config, config.layer_types.index("full_attention"))])
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            setattr(self, name, Qwen3_5RMSNorm(hidden, eps=config.rms_norm_eps))
        self.rotary = Qwen3_5TextRotaryEmbedding(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the normed states [tokens, hidden] of all tokens of a text."""
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)]
        x = self.fc(torch.cat(pair, -1))[None]
        count = x.shape[1]
        rotation = self.rotary(x, torch.arange(count)[None])
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        hidden: torch.Tensor = self.norm(self.layers[0](x, position_embeddings=rotation, attention_mask=mask))[0]
        return hidden

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by their published names."""
        return {f"mtp.{name}": value.detach().clone() for name, value in self.named_parameters()}


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return MTP tensors with a tensor for every matmul of every expert instead of one for all experts."""
    experts = "mtp.layers.0.mlp.experts"
    parts: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if name == f"{experts}.gate_up_proj":
            for at, of_one in enumerate(value):
                gate, up = of_one.chunk(2)
                parts[f"{experts}.{at}.gate_proj.weight"] = gate.clone()
                parts[f"{experts}.{at}.up_proj.weight"] = up.clone()
        elif name == f"{experts}.down_proj":
            parts |= {f"{experts}.{at}.down_proj.weight": of_one.clone() for at, of_one in enumerate(value)}
        else:
            parts[name] = value
    return parts


def values(tensor: StoredTensor) -> torch.Tensor:
    """Read a tensor of a checkpoint."""
    count = math.prod(tensor.shape)
    return torch.from_numpy(np.fromfile(tensor.file, tensor.dtype, count, offset=tensor.offset)).view(tensor.shape)


def add_mtp(folder: Path, seed: int = 3, *, stacked: bool = True) -> MtpOfQwen:
    """Write a random MTP layer into the checkpoint of ``tiny_hybrid``, or into one of its family that reads images.

    ``stacked``: its experts are in one tensor, as Qwen publishes them, else in one each, as Qwen's FP8 files have them.
    """
    config = AutoConfig.from_pretrained(folder).get_text_config()
    config._attn_implementation = "eager"
    layer = MtpOfQwen(config, seed)
    file = folder / "model.safetensors"
    tensors = layer.tensors() if stacked else one_by_one(layer.tensors())
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields.get("text_config", fields)["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(fields))
    return layer


@pytest.mark.parametrize(
    ("kind", "stacked"), [("delta net", True), ("experts", True), ("experts", False)], ids=["dense", "stacked", "each"]
)
def test_the_mtp_layer_of_qwen3_5_gives_the_logits_of_transformers(tmp_path: Path, kind: str, stacked: bool) -> None:
    folder = tiny_hybrid(tmp_path / "target", kind)
    layer = add_mtp(folder, stacked=stacked)
    source = Checkpoint.open(folder)
    target = ModelSpec.from_hf(source.config)
    spec, draft, _ = MtpSpec.from_checkpoint(source, target, num_draft_tokens=3)
    shared = {
        "embed_tokens.weight": Draw(9).matrix(target.vocab, 32),
        "lm_head.weight": Draw(8).matrix(target.vocab, 32),
    }
    written = tmp_path / "written"
    written.mkdir()
    save_file({name: values(tensor) for name, tensor in draft.tensors.items()} | shared, written / "model.safetensors")
    draft = replace(draft, tensors=read_header(written / "model.safetensors"))
    head = fused(build_mtp(spec, draft, dtype="float32", capacity=CAPACITY, lowering="grouped"), "grouped")
    exported = Exported(written, spec, build_state_norm(spec, draft, dtype="float32"), head)
    generator = torch.Generator().manual_seed(5)
    text, features = torch.randint(target.vocab, (20,), generator=generator), torch.randn(20, 32, generator=generator)
    with torch.no_grad():
        states = layer(shared["embed_tokens.weight"][text], features)
    expected = states @ shared["lm_head.weight"].T
    exported.hold(text, features, states, expected)


def test_another_number_of_mtp_layers_is_rejected(tmp_path: Path) -> None:
    folder = tiny_hybrid(tmp_path)
    add_mtp(folder)
    source = Checkpoint.open(folder)
    source.config["mtp_num_hidden_layers"] = 2
    with pytest.raises(BadCheckpoint, match="mtp_num_hidden_layers should be 1, it is 2"):
        MtpSpec.from_checkpoint(source, ModelSpec.from_hf(source.config), num_draft_tokens=3)


@pytest.mark.parametrize(("kind", "target"), [("mtp", "delta net"), ("mtp", "experts"), ("eagle3", "delta net")])
def test_drafts_of_heads_change_no_token(tmp_path: Path, kind: str, target: str) -> None:
    folder = tiny_hybrid(tmp_path / "target", target, seed=1)
    add_mtp(folder)
    where = folder
    if kind == "eagle3":
        where = tmp_path / "head"
        head = eagle3.Head(vocab=320, hidden=32, target_layers=4, draft_vocab=320, head_dim=32, features=(1, 2, 3))
        head.save(where)
    drafting = f'kind = "{kind}"\ncheckpoint = "{where}"\nnum_draft_tokens = 4'
    recipe = write_recipe(tmp_path / "r.toml", target=folder, drafting=drafting)
    bundle = build(Recipe.load(recipe), tmp_path / "bundle").folder
    without, drafted = (outputs(bundle, num_draft_tokens=window) for window in (0, 4))
    assert [output_of(output) for output in drafted] == [output_of(output) for output in without]
    assert sum(output.speculation.num_draft_tokens for output in drafted) > 0
