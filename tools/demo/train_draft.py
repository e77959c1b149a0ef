"""Train a draft for the demo's target on text that the target generates.

Run ``python -m tools.demo.train_draft eagle3`` (or peagle, mtp, pard, dflash) in the root of the repository. The seed
fixes sentences, their order and the initial weights; floating-point results differ a little between machines.
"""

from pathlib import Path
from typing import Any

import typer

from tools.demo import models
from tools.demo.corpus import examples
from tools.demo.tokenizer import prompt_ids
from tools.drafts.command import Course, training
from tools.drafts.kinds import Kind, Sizes

FEATURES = (1, 3, 5)
"""The target's layers whose inputs heads read; its six are too few for the published default."""
MASK = 2047  # an id without text
BUILT = Path("engines/built/drafts")
"""Receives the drafts that are not part of the repository, which the recipes tools/demo/*.toml name."""


def _prompts(tokenizer: Any, seed: int, count: int) -> list[list[int]]:
    return [prompt_ids(tokenizer, example) for example in examples(seed, count)]


def _sizes(target: Any, _tokenizer: Any) -> Sizes:
    return Sizes(
        features=FEATURES,
        mask=MASK,
        width=256,
        heads=target.config.num_attention_heads // 2,
        smaller=lambda: models.load(models.DRAFT, target.device)[0].train(),
    )


main = training(
    Course(
        open_target=lambda device: models.load(models.TARGET, device),
        prompts=_prompts,
        sizes=_sizes,
        folder=lambda kind: (BUILT if kind in (Kind.MTP, Kind.PEAGLE) else models.CHECKPOINTS) / kind,
        rates={Kind.EAGLE3: 2e-3, Kind.PEAGLE: 2e-3, Kind.MTP: 1e-3, Kind.PARD: 3e-3, Kind.DFLASH: 2e-3},
        texts=8192,
        longest=320,
        together=1024,
        steps=2500,
        batch=32,
        vocabulary=768,
    )
)

if __name__ == "__main__":
    typer.run(main)
