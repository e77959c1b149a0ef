"""Train the hybrid of ``demo-hybrid``, which begins with the weights of the demo's draft.

``python -m tools.demo.train_hybrid`` from the root of the repository. The full attention starts as the draft's second
layer; the delta nets start without an effect and learn what its first layer did. It takes minutes on a CPU. The
included weights had a second run, with ``--seed 1 --rate 2e-3 --start FOLDER``, which goes on from those of the first.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional

from tools.demo import models
from tools.demo.batches import IGNORED
from tools.demo.train import Loss, Student, data

_DATA = 100  # a stream of examples of its own


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="Steps")] = 600,
    batch: Annotated[int, typer.Option(min=1, help="Examples per step")] = 8,
    rate: Annotated[float, typer.Option(help="The highest learning rate")] = 3e-3,
    start: Annotated[Path | None, typer.Option(help="A hybrid to go on from. Default: begin as the draft")] = None,
    seed: Annotated[int, typer.Option(help="Seed of data and initial weights")] = 0,
    out: Annotated[Path, typer.Option(help="Folder that receives the checkpoint")] = models.HYBRID,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a CPU")] = os.cpu_count() or 1,
) -> None:
    """Train the hybrid."""
    torch.set_num_threads(threads)
    draft, tokenizer = models.load(models.DRAFT, device)
    if start is None:
        hybrid = begin(models.create_hybrid(tokenizer, seed).to(device), draft)
    else:
        hybrid = models.load(start, device)[0].train()
    student = Student(hybrid, tokenizer, _loss(hybrid, draft))
    student.learn(data(tokenizer, _DATA + seed, batch, steps), steps, rate, out)


@torch.no_grad()
def begin(hybrid: Any, draft: Any) -> Any:
    """Copy what both models have from the draft, and let the delta nets add nothing."""
    first, second = draft.model.layers
    *recurrent, last = hybrid.model.layers
    hybrid.model.embed_tokens.load_state_dict(draft.model.embed_tokens.state_dict())
    _copy_norm(hybrid.model.norm, draft.model.norm)
    for layer in recurrent:
        layer.linear_attn.out_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for layer, source in ((recurrent[-1], first), (last, second)):
        layer.mlp.load_state_dict(source.mlp.state_dict())
        _copy_norm(layer.post_attention_layernorm, source.post_attention_layernorm)
    ours, theirs = last.self_attn, second.self_attn
    _copy_norm(last.input_layernorm, second.input_layernorm)
    _copy_norm(ours.q_norm, theirs.q_norm)
    _copy_norm(ours.k_norm, theirs.k_norm)
    for name in ("k_proj", "v_proj"):
        getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
    # A head's queries are followed by the gate of its outputs, which is 1/2 where its weights are zero.
    queries = theirs.q_proj.weight.unflatten(0, (-1, ours.head_dim))
    ours.q_proj.weight.copy_(torch.stack([queries, torch.zeros_like(queries)], 1).flatten(0, 2))
    ours.o_proj.weight.copy_(2 * theirs.o_proj.weight)
    return hybrid


def _loss(hybrid: Any, draft: Any) -> Loss:
    """Cross-entropy, plus how far the delta nets are from the draft's first layer, relative to its variance."""

    def states(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        masks = {"full_attention": None, "linear_attention": None}  # rows are padded at their ends
        outputs = model.model(input_ids=ids, attention_mask=masks, use_cache=False, output_hidden_states=True)
        return tuple(outputs.hidden_states)

    def loss(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            first = states(draft, ids)[1]
        *_, third, last = states(hybrid, ids)
        counted = targets != IGNORED
        distance = functional.mse_loss(third, first) / first.var()
        return distance + functional.cross_entropy(hybrid.lm_head(last[counted]), targets[counted])

    return loss


def _copy_norm(ours: Any, theirs: Any) -> None:
    ours.weight.copy_(theirs.weight - 1)  # Qwen3.5 adds 1


if __name__ == "__main__":
    typer.run(main)
