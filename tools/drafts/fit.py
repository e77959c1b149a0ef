"""Train a model with AdamW, a warm-up and a cosine schedule. An interrupted training leaves its last checkpoint."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import track

from tools.drafts.texts import Batch

_console = Console()
Lesson = TypeVar("Lesson", contravariant=True)


class Learner(Protocol[Lesson]):
    """A model in training."""

    def parameters_to_learn(self) -> list[torch.nn.Parameter]: ...

    def losses(self, batch: Lesson) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the loss, and for each drafted token the share of the target's best tokens that it predicts."""

    def save(self, folder: Path) -> None: ...


Draft = Learner[Batch]


def fit(
    model: Learner[Lesson],
    batches: Iterator[Lesson],
    steps: int,
    rate: float,
    folder: Path,
    *,
    warmup: int = 20,
    decay: float = 0.01,
) -> None:
    """Train for ``steps`` batches at a learning rate of at most ``rate``; write ``folder`` ten times.

    ``warmup``: steps until the rate is reached, a tenth of all at most. ``decay``: weight decay.
    """
    parameters = model.parameters_to_learn()
    _console.print(f"{sum(each.numel() for each in parameters) / 1e6:.2f} million parameters to learn")
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps, warmup))
    started, reports = time.perf_counter(), math.ceil(steps / 10)
    for step, batch in zip(track(range(1, steps + 1)), batches, strict=False):
        loss, right = model.losses(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % reports == 0 or step == steps:
            shares = f"foreseen {' '.join(f'{float(each):.3f}' for each in right)}, " if right else ""
            seconds = time.perf_counter() - started
            _console.print(f"step {step}/{steps}: loss {loss.item():.4f}, {shares}{seconds:.0f} s")
            _save(model, folder)
    _console.print(f"saved {folder}")


def _save(model: Learner[Lesson], folder: Path) -> None:
    """Replace the files in ``folder`` so that an interruption leaves the previous checkpoint or none."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as written:
        model.save(Path(written))
        (folder / "config.json").unlink(missing_ok=True)  # a folder without config.json is not a checkpoint
        for file in sorted(Path(written).iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(folder / file.name)


def _rate(step: int, steps: int, longest: int) -> float:
    warmup = max(1, min(longest, steps // 10))
    return (step + 1) / warmup if step < warmup else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
