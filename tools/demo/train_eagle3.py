"""Train an EAGLE-3 head for the demo's target, on text that the target writes itself.

``python -m tools.demo.train_eagle3`` from the root of the repository; minutes on one core of a CPU. Sentences, their
order and the first weights follow from the seed; floating point does not, so weights differ a little between machines.
"""

import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch.nn import functional

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe import Recipe, locate
from tandemrt.export.build import build
from tools.demo import eagle3, models
from tools.demo.corpus import examples
from tools.demo.tokenizer import prompt_ids

_TOGETHER = 32  # sentences that are asked at a time
_console = Console()


def main(
    texts: Annotated[int, typer.Option(min=1, help="Texts that the target writes, every second one drawn")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training")] = 400,
    batch: Annotated[int, typer.Option(min=1, help="Texts per step")] = 6,
    ahead: Annotated[int, typer.Option(min=1, help="Drafted tokens that a place is trained for")] = 3,
    vocabulary: Annotated[int, typer.Option(min=1, help="Tokens that the head drafts, the most frequent ones")] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of sentences, samples and first weights")] = 0,
    out: Annotated[Path, typer.Option(help="Folder that receives the head")] = models.CHECKPOINTS / "eagle3",
) -> None:
    torch.manual_seed(seed)
    target, tokenizer = models.load(models.TARGET)
    for parameter in target.parameters():
        parameter.requires_grad_(False)
    written = _texts(tokenizer, texts, seed)
    counts = torch.bincount(torch.cat([ids[begin:] for ids, begin in written]), minlength=target.config.vocab_size)
    drafted = counts.argsort(descending=True, stable=True)[:vocabulary].sort().values
    share = float(counts[drafted].sum() / counts.sum())
    head = eagle3.Eagle3(target, drafted)
    parameters = [each for each in head.parameters() if each.requires_grad]
    size = sum(each.numel() for each in parameters)
    _console.print(
        f"{size / 1e6:.2f} million parameters, {len(drafted)} tokens, which are {share:.2%} of what the target writes"
    )
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    started, reports = time.perf_counter(), max(1, steps // 10)
    for step, (ids, begins) in zip(track(range(1, steps + 1)), _batches(written, batch, seed), strict=False):
        losses, right = _losses(head, target, ids, begins, ahead)
        optimizer.zero_grad(set_to_none=True)
        loss = torch.stack(losses).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % reports == 0:
            found = " ".join(f"{each:.3f}" for each in right)
            seconds = time.perf_counter() - started
            _console.print(f"step {step}/{steps}: loss {loss.item():.4f}, foreseen {found}, {seconds:.0f} s")
    eagle3.save(head, target, out)
    _console.print(f"saved {out}")


def _texts(tokenizer: Any, count: int, seed: int) -> list[tuple[torch.Tensor, int]]:
    """Prompts with the answers that the target gives, and how long the prompts are; every second one is drawn."""
    found = []
    with TemporaryDirectory() as folder:
        bundle = build(Recipe.load(locate("demo")), Path(folder) / "demo").folder
        with LLM(bundle, threads=1) as llm:
            asked = list(examples(seed, count))
            for at in track(range(0, count, _TOGETHER), description="the target writes"):
                part = asked[at : at + _TOGETHER]
                params = [SamplingParams(temperature=float(i % 2), seed=seed + at + i) for i in range(len(part))]
                prompts = [prompt_ids(tokenizer, example) for example in part]
                for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                    found.append((torch.tensor([*prompt, *output.token_ids]), len(prompt)))
    return found


def _batches(
    written: list[tuple[torch.Tensor, int]], batch: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Padded ids [batch, length] and where answers begin [batch], texts of like length together, without an end."""
    order, rng = sorted(written, key=lambda text: len(text[0])), random.Random(seed)
    while True:
        chunks = [order[at : at + batch] for at in range(0, len(order), batch)]
        rng.shuffle(chunks)
        for chunk in chunks:
            ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in chunk], batch_first=True, padding_value=-1)
            yield ids, torch.tensor([begin for _, begin in chunk])


def _losses(
    head: eagle3.Eagle3, target: Any, ids: torch.Tensor, begins: torch.Tensor, ahead: int
) -> tuple[list[torch.Tensor], list[float]]:
    """For each step the divergence from the target's law over the draft's vocabulary, and how often the token that
    the target thinks most likely is foreseen."""
    counts = ids >= 0
    tokens = ids.clamp(min=0)
    with torch.no_grad():
        output = target(input_ids=tokens, use_cache=False, output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer] for layer in eagle3.FEATURES], -1)
        laws, best = output.logits.softmax(-1)[..., head.vocabulary], output.logits.argmax(-1)
    losses, right = [], []
    for step, logits in enumerate(head(tokens, features, ahead)):
        places = slice(1 + step, None)  # whose law a row of this step foresees
        law, place = laws[:, places], torch.arange(ids.shape[1])[places]
        matters = (counts[:, places] & (place >= begins[:, None] - 1)).float()
        loss = functional.kl_div(logits.log_softmax(-1), law, reduction="none").sum(-1)
        losses.append((loss * matters).sum() / matters.sum() * 0.8**step)
        foreseen = head.vocabulary[logits.argmax(-1)] == best[:, places]
        right.append(float((foreseen * matters).sum() / matters.sum()))
    return losses, right


def _rate(step: int, steps: int) -> float:
    warmup = max(1, min(20, steps // 10))
    return (step + 1) / warmup if step < warmup else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))


if __name__ == "__main__":
    typer.run(main)
