"""Train the demo checkpoints: tokenizer, then target, then a draft distilled from the target.

``python -m tools.demo.train`` from the root of the repository. The data are the same for the same seed on every
machine; floating point is not, so the weights differ a little between machines.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn import functional
from torch.utils.data import DataLoader

from tools.demo import models
from tools.demo.batches import IGNORED, Batch, Batches
from tools.demo.corpus import Example, examples
from tools.demo.decode import exact, greedy
from tools.demo.tokenizer import train_tokenizer

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_WARMUP, _FRESH = 300, 64
_console = Console()


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    steps: Annotated[int, typer.Option(help="Steps of the target")] = 6_000,
    draft_steps: Annotated[int, typer.Option(help="Steps of the draft")] = 4_000,
    batch: Annotated[int, typer.Option(help="Examples per step")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of data and initial weights")] = 0,
    out: Annotated[Path, typer.Option(help="Folder that receives target/ and draft/")] = models.CHECKPOINTS,
    workers: Annotated[int, typer.Option(help="Processes that make batches")] = max(1, (os.cpu_count() or 2) - 2),
    draft_only: Annotated[bool, typer.Option("--draft-only", help="Keep the target that is in the folder")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the decoder layers")] = False,
) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_float32_matmul_precision("high")
    tokenizer = train_tokenizer(seed)
    _console.print(f"tokenizer: {len(tokenizer)} tokens")

    def data(stream: int, count: int) -> Iterator[Batch]:
        chunks = DataLoader(
            Batches(tokenizer, stream, batch, count),
            batch_size=None,
            num_workers=workers,
            pin_memory=device != "cpu",
        )
        return (one for chunk in chunks for one in chunk)

    def prepared(model: Any) -> Any:
        model = model.to(device)
        if compiled:  # layer by layer: layers of the same shape share code
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        return model

    if not draft_only:
        target = prepared(models.create(models.TARGET_SHAPE, tokenizer, seed))
        fit("target", target, _truth_loss(target), data(2 * seed, steps), steps, 2e-3, tokenizer)
        models.save(target, tokenizer, out / "target")

    torch.compiler.reset()  # the target's compiled layers count towards the limit on recompilations
    teacher, _ = models.load(out / "target")
    draft = prepared(models.create(models.DRAFT_SHAPE, tokenizer, seed + 1))
    fit(
        "draft",
        draft,
        _teacher_loss(draft, prepared(teacher)),
        data(2 * seed + 1, draft_steps),
        draft_steps,
        4e-3,
        tokenizer,
    )
    models.save(draft, tokenizer, out / "draft")
    _console.print(f"saved {out / 'target'} and {out / 'draft'}")


def fit(
    name: str,
    model: Any,
    loss: Loss,
    batches: Iterator[Batch],
    steps: int,
    rate: float,
    tokenizer: Any,
    *,
    reports: int = 10,
) -> None:
    """Train ``model`` in place, with a warm-up to the learning ``rate`` and a cosine decay, and print ``reports``."""
    device = model.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    fresh = list(examples(-1, _FRESH))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _console.print(f"{name}: {parameters / 1e6:.2f} million parameters, {steps} steps on {device}")
    reported, started = 0, time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_console, disable=not _console.is_terminal) as progress:
        task = progress.add_task(name, total=steps)
        for step, (ids, targets) in zip(range(1, steps + 1), batches, strict=False):
            mixed = torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else nullcontext()
            with mixed:
                value: Any = loss(ids.to(device, non_blocking=True), targets.to(device, non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.advance(task)
            if step % math.ceil(steps / reports) == 0 or step == steps:
                last = value.item()
                pace = (step - reported) / (time.perf_counter() - started)
                right = _right(model, tokenizer, fresh)
                _console.print(
                    f"{name} step {step}/{steps}: loss {last:.4f}, exact {right}/{_FRESH}, {pace:.1f} steps/s"
                )
                reported, started = step, time.perf_counter()


def _right(model: Any, tokenizer: Any, asked: list[Example]) -> int:
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        answers = greedy(model, tokenizer, asked)
    model.train()
    return sum(exact(tokenizer, example, answer) for example, answer in zip(asked, answers, strict=True))


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


def _rate(step: int, steps: int) -> float:
    warmup = min(_WARMUP, max(1, steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


if __name__ == "__main__":
    typer.run(main)
