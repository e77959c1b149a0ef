"""Train the demo checkpoints: tokenizer, then target, then a draft distilled from the target.

``python -m tools.demo.train`` from the root of the repository. The data are the same for the same seed on every
machine; floating point is not, so the weights differ a little between machines.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch.nn import functional
from torch.utils.data import DataLoader

from tools.demo import models
from tools.demo.batches import IGNORED, Batch, Batches
from tools.demo.corpus import examples
from tools.demo.decode import exact, greedy
from tools.demo.tokenizer import train_tokenizer
from tools.drafts.fit import fit

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_FRESH = 64  # sentences that a trained model answers
_console = Console()


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    steps: Annotated[int, typer.Option(help="Steps of the target")] = 6_000,
    draft_steps: Annotated[int, typer.Option(help="Steps of the draft")] = 4_000,
    batch: Annotated[int, typer.Option(help="Examples per step")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of data and initial weights")] = 0,
    out: Annotated[Path, typer.Option(help="Folder that receives target/ and draft/")] = models.CHECKPOINTS,
) -> None:
    """Train the target and its draft."""
    torch.set_float32_matmul_precision("high")
    tokenizer = train_tokenizer(seed)
    target = models.create(models.TARGET_SHAPE, tokenizer, seed).to(device)
    student = Student(target, tokenizer, _truth_loss(target))
    student.learn(data(tokenizer, 2 * seed, batch, steps), steps, 2e-3, out / "target")
    teacher, _ = models.load(out / "target", device)
    draft = models.create(models.DRAFT_SHAPE, tokenizer, seed + 1).to(device)
    student = Student(draft, tokenizer, _teacher_loss(draft, teacher))
    student.learn(data(tokenizer, 2 * seed + 1, batch, draft_steps), draft_steps, 4e-3, out / "draft")


def data(tokenizer: Any, seed: int, batch: int, steps: int) -> Iterator[Batch]:
    """Yield batches that other processes make."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    workers = max(1, (os.cpu_count() or 2) - 2)
    chunks = DataLoader(Batches(tokenizer, seed, batch, steps), batch_size=None, num_workers=workers)
    return (each for chunk in chunks for each in chunk)


class Student:
    """A model of the demo that learns by ``loss`` (fit.Draft)."""

    def __init__(self, model: Any, tokenizer: Any, loss: Loss) -> None:
        self._model, self._tokenizer, self._loss = model, tokenizer, loss

    def learn(self, batches: Iterator[Batch], steps: int, rate: float, folder: Path) -> None:
        """Train the model, write it to ``folder``, and print how many fresh sentences it answers exactly."""
        fit(self, batches, steps, rate, folder, warmup=300, decay=0.05)
        self._model.eval()
        asked = list(examples(-1, _FRESH))
        answers = zip(asked, greedy(self._model, self._tokenizer, asked), strict=True)
        right = sum(exact(self._tokenizer, example, answer) for example, answer in answers)
        _console.print(f"{folder.name}: {right} of {_FRESH} records exact")

    def parameters_to_learn(self) -> list[torch.nn.Parameter]:
        """As Draft.parameters_to_learn."""
        return list(self._model.parameters())

    def losses(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As Draft.losses; no drafted tokens are compared."""
        device = self._model.device
        ids, targets = (part.to(device) for part in batch)
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
            return self._loss(ids, targets), []

    def save(self, folder: Path) -> None:
        """As Draft.save."""
        models.save(deepcopy(self._model), self._tokenizer, folder)


def _truth_loss(model: Any) -> Loss:
    def loss(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(_logits(model, ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    return loss


def _teacher_loss(model: Any, teacher: Any) -> Loss:
    # Forward KL from the teacher's distribution at every counted position (Hinton et al., 2015, at temperature 1).
    def loss(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            probs = _logits(teacher, ids).softmax(-1)
        divergence = functional.kl_div(_logits(model, ids).log_softmax(-1), probs, reduction="none").sum(-1)
        counts = (targets != IGNORED).float()
        return (divergence * counts).sum() / counts.sum()

    return loss


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    # Rows are padded at the end, so causal attention is correct without a mask, and uses its fast path.
    logits: torch.Tensor = model(input_ids=ids, attention_mask={"full_attention": None}, use_cache=False).logits
    return logits.float()


if __name__ == "__main__":
    typer.run(main)
