"""MTP layers of DeepSeek-V3 and GLM-4.5, after dense first layers, against transformers' decoder layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.export.model.mtp import build_mtp, build_state_norm
from tandemrt.export.quantize.writer import copied, write_safetensors
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.mtp import MtpSpec
from tandemrt.export.read.spec import ModelSpec
from tests.engine.decoding import edit_config, fused, randomize
from tests.engine.test_eagle3_graphs import CAPACITY, Exported
from tests.families.cases import FAMILIES
from tests.heads import Draw
from tests.makers import VOCAB as WIDE
from tests.makers import tiny_tokenizer, write_recipe

LAYERS = 2  # of the target: a dense one, and one with experts


def write_target(case: str, folder: Path, **sizes: Any) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Write a model whose third layer is an MTP layer. Returns the model with three layers, and the other weights."""
    fields = FAMILIES[case]().to_dict() | {"num_hidden_layers": LAYERS + 1} | sizes
    config = AutoConfig.for_model(**{name: value for name, value in fields.items() if name != "mlp_layer_types"})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(folder)
    hidden, draw, name = config.hidden_size, Draw(4), f"model.layers.{LAYERS}"
    own = {f"{name}.{norm}.weight": draw.norm(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
    own[f"{name}.eh_proj.weight"] = draw.matrix(hidden, 2 * hidden)
    copies = {f"{name}.shared_head.head.weight": torch.zeros(config.vocab_size, hidden)}
    file = folder / "model.safetensors"
    save_file(load_file(file) | own | copies, file, metadata={"format": "pt"})
    edit_config(folder, num_hidden_layers=LAYERS, num_nextn_predict_layers=1, mlp_layer_types=None)
    return model, own


def defined(
    model: PreTrainedModel, own: dict[str, torch.Tensor], text: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """The normed states [tokens, hidden] of all tokens of a text."""
    enorm, hnorm, last, matmul = own.values()
    pair = [model.model.embed_tokens(text), features]
    eps = model.config.rms_norm_eps
    pair = [rms_norm(each, each.shape[-1:], norm, eps) for each, norm in zip(pair, (enorm, hnorm), strict=True)]
    x, count = (torch.cat(pair, -1) @ matmul.T)[None], len(text)
    rotation = model.model.rotary_emb(x, torch.arange(count)[None])
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    states = model.model.layers[LAYERS](x, position_embeddings=rotation, attention_mask=mask)
    return rms_norm(states[0], last.shape, last, eps)


def test_drafts_of_deepseek_v3_2_change_no_token(tmp_path: Path) -> None:
    """Its layers, the MTP layer too, have an index over keys, which the graphs leave out."""
    index = {"model_type": "deepseek_v32", "index_topk": 512, "index_head_dim": 64, "index_n_heads": 2}
    write_target("deepseek_v3", tmp_path, vocab_size=WIDE, max_position_embeddings=1024, **index)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[2] for name in stored if ".indexer." in name} == {"0", "1", str(LAYERS)}
    tiny_tokenizer(tmp_path)
    drafting = f'kind = "mtp"\ncheckpoint = "{tmp_path}"\nnum_draft_tokens = 3'
    recipe = write_recipe(tmp_path / "r.toml", target=tmp_path, drafting=drafting)
    with LLM(build(Recipe.load(recipe), tmp_path / "bundle").folder, device="cpu", threads=1) as llm:
        without, outputs = (
            llm.generate(
                [[7, 9, 11], [3]], SamplingParams(max_tokens=8, seed=1, ignore_eos=True, num_draft_tokens=window)
            )
            for window in (0, 3)
        )
    assert [output.token_ids for output in outputs] == [output.token_ids for output in without]
    assert sum(output.speculation.num_draft_tokens for output in outputs) > 0


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe"])
def test_the_mtp_layer_of_a_mixture_gives_the_logits_of_transformers(tmp_path: Path, case: str) -> None:
    model, own = write_target(case, tmp_path)
    source = Checkpoint.open(tmp_path)
    target = ModelSpec.from_hf(source.config)
    assert target.experts is not None
    assert target.experts.layers == (False, True)
    spec, checkpoint, _ = MtpSpec.from_checkpoint(source, target, num_draft_tokens=3)
    written = tmp_path / "written"
    written.mkdir()
    write_safetensors(written / "model.safetensors", [copied(tensor) for tensor in checkpoint.tensors.values()])
    shared = {"embed_tokens.weight": model.model.embed_tokens.weight, "lm_head.weight": model.lm_head.weight}
    save_file(load_file(written / "model.safetensors") | shared, written / "model.safetensors")
    (written / "config.json").write_text((tmp_path / "config.json").read_text())
    draft = Checkpoint.open(written)
    head = fused(build_mtp(spec, draft, dtype="float32", capacity=CAPACITY, lowering="grouped"), "grouped")
    exported = Exported(written, spec, build_state_norm(spec, draft, dtype="float32"), head)
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(target.vocab, (20,), generator=generator)
    features = torch.randn(20, target.hidden, generator=generator)
    with torch.no_grad():
        states = defined(model, own, text, features)
        expected = model.lm_head(states)
    exported.hold(text, features, states, expected)
