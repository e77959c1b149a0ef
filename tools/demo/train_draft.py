"""Train a draft for the demo's target on text that the target generates.

Run ``python -m tools.demo.train_draft eagle3`` (or peagle, mtp, pard, dflash) in the root of the repository. The seed
fixes sentences, their order and the initial weights; floating-point results differ a little between machines.
"""

from pathlib import Path
from typing import Annotated

import typer

from tools.demo import models
from tools.demo.corpus import examples
from tools.demo.tokenizer import prompt_ids
from tools.drafts import command
from tools.drafts.kinds import Kind, Sizes

FEATURES = (1, 3, 5)
"""The target's layers whose inputs heads read; its six are too few for the published default."""
MASK = 2047  # an id without text
BUILT = Path("engines/built/drafts")
"""Receives the drafts that are not part of the repository, which the recipes tools/demo/*.toml name."""
RATES = {Kind.EAGLE3: 2e-3, Kind.PEAGLE: 2e-3, Kind.MTP: 1e-3, Kind.PARD: 3e-3, Kind.DFLASH: 2e-3}


def main(
    kind: command.KindArgument,
    device: command.Device = command.DEVICE,
    texts: command.Texts = 8192,
    longest: command.Longest = 320,
    together: command.Together = 1024,
    written: command.Written = None,
    steps: command.Steps = 2500,
    batch: command.Batch = 32,
    vocabulary: command.Vocabulary = 768,
    width: Annotated[int, typer.Option(min=1, help="Width of the MLPs of eagle3, peagle and dflash")] = 256,
    seed: command.Seed = 0,
    out: command.Out = None,
) -> None:
    """Train a draft."""
    target, tokenizer = models.load(models.TARGET, device)
    command.train(
        kind,
        target,
        tokenizer,
        [prompt_ids(tokenizer, example) for example in examples(seed, texts)],
        Sizes(
            features=FEATURES,
            mask=MASK,
            width=width,
            heads=target.config.num_attention_heads // 2,
            smaller=lambda: models.load(models.DRAFT, device)[0].train(),
        ),
        out or (BUILT if kind in (Kind.MTP, Kind.PEAGLE) else models.CHECKPOINTS) / kind,
        rate=RATES[kind],
        longest=longest,
        together=together,
        written=written,
        steps=steps,
        batch=batch,
        vocabulary=vocabulary,
        seed=seed,
    )


if __name__ == "__main__":
    typer.run(main)
