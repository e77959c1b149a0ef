"""What the commands have in common that train drafts: their options, and what is done with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from tools.drafts.fit import fit
from tools.drafts.kinds import Kind, Sizes, untrained
from tools.drafts.texts import batches, most_frequent, texts_of

KindArgument = Annotated[Kind, typer.Argument(help="What is trained")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Texts = Annotated[int, typer.Option(min=1, help="Texts that the target writes, every second batch drawn")]
Longest = Annotated[int, typer.Option(min=1, help="Tokens of an answer")]
Together = Annotated[int, typer.Option(min=1, help="Texts that the target writes at a time")]
Written = Annotated[
    Path | None,
    typer.Option(help="A file that keeps the texts; it is read if it is there, and refused if it has others"),
]
Steps = Annotated[int, typer.Option(min=1, help="Steps of training")]
Batch = Annotated[int, typer.Option(min=1, help="Texts per step")]
Vocabulary = Annotated[int, typer.Option(min=1, help="Tokens that eagle3, peagle, dflash draft, the most frequent")]
Seed = Annotated[int, typer.Option(help="Seed of prompts, samples and first weights")]
Out = Annotated[Path | None, typer.Option(help="Folder that receives the draft; else that of the recipe")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_console = Console()


def train(
    kind: Kind,
    target: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    sizes: Sizes,
    out: Path,
    *,
    rate: float,
    longest: int,
    together: int,
    written: Path | None,
    steps: int,
    batch: int,
    vocabulary: int,
    seed: int,
) -> None:
    """Train a draft of ``kind`` for ``target`` on what that writes to ``prompts`` (token ids), and write it to ``out``.

    ``rate``: the highest learning rate. The rest are the options of a command, see above.
    """
    torch.manual_seed(seed)
    if target.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    target.requires_grad_(False)
    ends = tokenizer.eos_token_id
    found = texts_of(target, prompts, written, seed=seed, ends=ends, longest=longest, together=together)
    drafted, share = most_frequent(found, vocabulary, target.config.vocab_size)
    draft = untrained(kind, target, tokenizer, sizes, drafted.to(target.device), seed)
    if not kind.knows_all:
        _console.print(f"{len(drafted)} tokens are drafted, which are {share:.2%} of what the target writes")
    fit(draft, batches(found, batch, seed, target.device), steps, rate, out)
