"""Train a draft for the demo's target, on text that the target writes itself.

``python -m tools.demo.train_draft eagle3`` (or pard, dflash) from the root of the repository. Sentences, their order
and the first weights follow from the seed; floating point does not, so weights differ a little between machines.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from tools.demo import models
from tools.demo.corpus import examples
from tools.demo.tokenizer import prompt_ids
from tools.drafts.dflash import DFlash
from tools.drafts.eagle3 import Eagle3
from tools.drafts.fit import Draft, fit
from tools.drafts.kinds import Kind
from tools.drafts.pard import Pard
from tools.drafts.texts import batches, most_frequent, texts_of

FEATURES = (1, 3, 5)
"""The target's layers whose inputs heads read; its six are too few for the published default."""
MASK = 2047  # an id that spells nothing
RATES = {Kind.EAGLE3: 2e-3, Kind.PARD: 3e-3, Kind.DFLASH: 2e-3}
_console = Console()


def main(
    kind: Annotated[Kind, typer.Argument(help="What is trained")],
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    texts: Annotated[int, typer.Option(min=1, help="Texts that the target writes, every second batch drawn")] = 8192,
    together: Annotated[int, typer.Option(min=1, help="Texts that the target writes at a time")] = 1024,
    written: Annotated[
        Path | None,
        typer.Option(help="A file that keeps the texts; it is read if it is there, and refused if it has others"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training")] = 2500,
    batch: Annotated[int, typer.Option(min=1, help="Texts per step")] = 32,
    vocabulary: Annotated[int, typer.Option(min=1, help="Tokens that a head drafts, the most frequent ones")] = 768,
    width: Annotated[int, typer.Option(min=1, help="Width of a head's MLPs")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of sentences, samples and first weights")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder that receives the draft; else that of the demo")] = None,
) -> None:
    """Train a draft."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    target, tokenizer = models.load(models.TARGET, device)
    target.requires_grad_(False)
    ends, longest = tokenizer.eos_token_id, 320
    prompts = [prompt_ids(tokenizer, example) for example in examples(seed, texts)]
    found = texts_of(target, prompts, written, seed=seed, ends=ends, longest=longest, together=together)
    drafted, share = most_frequent(found, vocabulary, target.config.vocab_size)
    drafted = drafted.to(device)
    draft: Draft
    match kind:
        case Kind.PARD:
            model, _ = models.load(models.DRAFT, device)
            draft = Pard(target, model.train(), tokenizer, mask=MASK, seed=seed)
        case Kind.EAGLE3:
            draft = Eagle3(target, drafted, features=FEATURES, width=width).to(device)
        case Kind.DFLASH:
            heads = target.config.num_attention_heads // 2
            draft = DFlash(target, drafted, features=FEATURES, heads=heads, width=width, mask=MASK, seed=seed).to(
                device
            )
    if kind is not Kind.PARD:
        _console.print(f"{len(drafted)} tokens are drafted, which are {share:.2%} of what the target writes")
    fit(draft, batches(found, batch, seed, device), steps, RATES[kind], out or models.CHECKPOINTS / kind)


if __name__ == "__main__":
    typer.run(main)
