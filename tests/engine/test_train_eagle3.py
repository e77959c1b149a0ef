"""What the demo's head is trained on is what drafting computes."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.eagle3 import Eagle3Spec
from tandemrt.export.read.heads import target_ids
from tandemrt.export.read.spec import ModelSpec
from tests.eagle3 import Definition, Head
from tools.demo.eagle3 import FEATURES, Eagle3, save

HEAD = Head(vocab=64, hidden=32, target_layers=6, draft_vocab=32, features=FEATURES, own_embedding=False)


def test_each_step_of_training_sees_what_a_drafted_token_sees(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
    )
    torch.manual_seed(3)
    target = Qwen3ForCausalLM(config).eval()
    head = Eagle3(target, torch.arange(0, 64, 2))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter)).copy_(parameter.half())
        ids = torch.randint(64, (2, 14))
        states = target(ids, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in FEATURES], -1)
        found = head(ids, features, 3)
    save(head, target, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    spec = Eagle3Spec.from_hf(checkpoint.config, ModelSpec.from_hf(config.to_dict()))
    drafted = target_ids(checkpoint, spec)
    assert drafted is not None
    assert drafted.tolist() == list(range(0, 64, 2))
    weights = {name: each.float() for name, each in load_file(tmp_path / "model.safetensors").items()}
    for row, place in ((0, 3), (1, 8)):
        defined = Definition(HEAD, weights, target.model.embed_tokens.weight.detach())
        logits, state = defined(ids[row, 1 : place + 2], defined.fuse(features[row])[: place + 1])
        for step, seen in enumerate(found):
            torch.testing.assert_close(seen[row, place], logits[-1], atol=1e-4, rtol=1e-3)
            logits, state = defined(ids[row, place + 2 + step, None], state[-1:])
