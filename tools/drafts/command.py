"""The commands that train drafts: ``python -m tools.demo.train_draft``, ``python -m tools.real.train_draft``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from tools.drafts.fit import fit
from tools.drafts.kinds import Kind, Sizes, untrained
from tools.drafts.texts import batches, most_frequent, texts_of

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_console = Console()


@dataclass(frozen=True)
class Course:
    """How the drafts of a target are trained. Numbers are the defaults of options.

    Attributes:
        open_target: returns the target on a device, and its tokenizer.
        prompts: returns token ids of so many prompts, for a tokenizer and a seed.
        sizes: returns the sizes of drafts, for a target and its tokenizer.
        folder: returns where a draft is written.
        rates: the highest learning rates.
        texts: texts that the target generates.
        longest: tokens of an answer.
        together: texts that the target generates in a batch.
        steps: steps of training.
        batch: texts per step.
        vocabulary: the most frequent tokens, which eagle3, peagle and dflash draft.
    """

    open_target: Callable[[str], tuple[Any, Any]]
    prompts: Callable[[Any, int, int], Sequence[Sequence[int]]]
    sizes: Callable[[Any, Any], Sizes]
    folder: Callable[[Kind], Path]
    rates: Mapping[Kind, float]
    texts: int
    longest: int
    together: int
    steps: int
    batch: int
    vocabulary: int


def training(course: Course) -> Callable[..., None]:
    """Return the command that trains a draft by ``course``."""

    def train(
        kind: Annotated[Kind, typer.Argument(help="The kind of draft")],
        device: Annotated[str, typer.Option(help="cpu or cuda")] = _DEVICE,
        texts: Annotated[
            int, typer.Option(min=1, help="Texts that the target generates; every second batch is sampled")
        ] = course.texts,
        longest: Annotated[int, typer.Option(min=1, help="Tokens of an answer")] = course.longest,
        together: Annotated[
            int, typer.Option(min=1, help="Texts that the target generates in a batch")
        ] = course.together,
        written: Annotated[
            Path | None,
            typer.Option(help="A file of the texts; if it exists it is read, and refused if they have another origin"),
        ] = None,
        steps: Annotated[int, typer.Option(min=1, help="Steps of training")] = course.steps,
        batch: Annotated[int, typer.Option(min=1, help="Texts per step")] = course.batch,
        vocabulary: Annotated[
            int, typer.Option(min=1, help="Most frequent tokens, which eagle3, peagle and dflash draft")
        ] = course.vocabulary,
        seed: Annotated[int, typer.Option(help="Seed of prompts, samples and first weights")] = 0,
        out: Annotated[Path | None, typer.Option(help="Folder of the draft. Default: that of the recipe")] = None,
    ) -> None:
        """Train a draft on texts that its target generates."""
        target, tokenizer = course.open_target(device)
        torch.manual_seed(seed)
        if target.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        target.requires_grad_(False)
        prompts, ends = course.prompts(tokenizer, seed, texts), tokenizer.eos_token_id
        drawn = texts_of(target, prompts, written, seed=seed, ends=ends, longest=longest, together=together)
        drafted, share = most_frequent(drawn, vocabulary, target.config.vocab_size)
        sizes = course.sizes(target, tokenizer)
        draft = untrained(kind, target, tokenizer, sizes, drafted.to(target.device), seed)
        if not kind.has_full_vocabulary:
            _console.print(f"{len(drafted)} tokens are drafted, which are {share:.2%} of what the target writes")
        fit(draft, batches(drawn, batch, seed, target.device), steps, course.rates[kind], out or course.folder(kind))

    return train
