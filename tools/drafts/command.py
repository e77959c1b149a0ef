"""Options and the common steps of the commands that train drafts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from tools.drafts.fit import fit
from tools.drafts.kinds import Kind, Sizes, untrained
from tools.drafts.texts import batches, most_frequent, texts_of

KindArgument = Annotated[Kind, typer.Argument(help="The kind of draft")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Texts = Annotated[int, typer.Option(min=1, help="Texts that the target generates; every second batch is sampled")]
Longest = Annotated[int, typer.Option(min=1, help="Tokens of an answer")]
Together = Annotated[int, typer.Option(min=1, help="Texts that the target generates in a batch")]
Written = Annotated[
    Path | None,
    typer.Option(
        help="A file to store the texts in; if it exists it is read, and refused if its texts have another origin"
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Steps of training")]
Batch = Annotated[int, typer.Option(min=1, help="Texts per step")]
Vocabulary = Annotated[
    int, typer.Option(min=1, help="Size of the vocabulary of eagle3, peagle and dflash: the most frequent tokens")
]
Seed = Annotated[int, typer.Option(help="Seed of prompts, samples and first weights")]
Out = Annotated[Path | None, typer.Option(help="Folder to write the draft to. Default: that of the recipe")]
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
    """Train a draft of ``kind`` on texts of ``target``, and write it to ``out``.

    ``prompts``: token ids. ``rate``: the highest learning rate. The other arguments are the options above.
    """
    torch.manual_seed(seed)
    if target.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    target.requires_grad_(False)
    ends = tokenizer.eos_token_id
    texts = texts_of(target, prompts, written, seed=seed, ends=ends, longest=longest, together=together)
    drafted, share = most_frequent(texts, vocabulary, target.config.vocab_size)
    draft = untrained(kind, target, tokenizer, sizes, drafted.to(target.device), seed)
    if not kind.has_full_vocabulary:
        _console.print(f"{len(drafted)} tokens are drafted, which are {share:.2%} of what the target writes")
    fit(draft, batches(texts, batch, seed, target.device), steps, rate, out)
