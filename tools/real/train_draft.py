"""Train a draft for SmolLM2-135M-Instruct on text that the target generates.

    python -m tools.real.checkpoint engines/built/real/checkpoint
    python -m tools.real.train_draft eagle3

Other kinds are peagle, mtp, pard and dflash. Run it from the root of the repository; it takes minutes on a GPU. The
recipes tools/real/eagle3.toml and so on use the drafts. The seed fixes prompts (tools/real/prompts.py), their order and
the initial weights; floating-point results differ between machines.
"""

from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.drafts import command
from tools.drafts.kinds import Kind, Sizes
from tools.real.prompts import prompts

BUILT = Path("engines/built/real")
FEATURES = (2, 15, 27)  # the published default for 30 layers
MASK = "<empty_output>"  # a token that occurs only in pretraining on code
RATES = {Kind.EAGLE3: 1e-3, Kind.PEAGLE: 1e-3, Kind.MTP: 6e-4, Kind.PARD: 6e-4, Kind.DFLASH: 1e-3}


def main(
    kind: command.KindArgument,
    checkpoint: Annotated[Path, typer.Option(help="The folder that tools.real.checkpoint wrote")] = BUILT
    / "checkpoint",
    device: command.Device = command.DEVICE,
    texts: command.Texts = 4096,
    longest: command.Longest = 192,
    together: command.Together = 512,
    written: command.Written = None,
    steps: command.Steps = 1000,
    batch: command.Batch = 16,
    vocabulary: command.Vocabulary = 8192,
    layers: Annotated[int, typer.Option(min=1, help="Layers of a PARD draft, copied from the target")] = 6,
    seed: command.Seed = 0,
    out: command.Out = None,
) -> None:
    """Train a draft."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
    target: Any = model.to(device).eval()
    command.train(
        kind,
        target,
        tokenizer,
        [_chat(tokenizer, prompt) for prompt in prompts(seed, texts)],
        Sizes(
            features=FEATURES,
            mask=tokenizer.convert_tokens_to_ids(MASK),
            width=target.config.intermediate_size,
            heads=target.config.num_attention_heads,
            smaller=lambda: _smaller(target, layers),
        ),
        out or BUILT / kind,
        rate=RATES[kind],
        longest=longest,
        together=together,
        written=written,
        steps=steps,
        batch=batch,
        vocabulary=vocabulary,
        seed=seed,
    )


def _chat(tokenizer: Any, prompt: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _smaller(target: Any, layers: int) -> Any:
    """Return a trainable model of ``layers`` of the target's layers, evenly spaced."""
    smaller = deepcopy(target).train().requires_grad_(True)
    last = len(smaller.model.layers) - 1
    chosen = [round(last * at / max(1, layers - 1)) for at in range(layers)]
    smaller.model.layers = nn.ModuleList(smaller.model.layers[at] for at in chosen)
    smaller.config.num_hidden_layers = layers
    return smaller


if __name__ == "__main__":
    typer.run(main)
