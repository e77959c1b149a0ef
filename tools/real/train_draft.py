"""Train a draft for SmolLM2-135M-Instruct on text that the target generates.

    python -m tools.real.checkpoint engines/built/real/checkpoint
    python -m tools.real.train_draft eagle3

Other kinds are peagle, mtp, pard and dflash. Run it from the root of the repository; it takes minutes on a GPU. The
recipes tools/real/eagle3.toml and so on use the drafts. The seed fixes prompts (tools/real/prompts.py), their order and
the initial weights; floating-point results differ between machines.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.drafts.command import Course, training
from tools.drafts.kinds import Kind, Sizes
from tools.real.prompts import prompts

BUILT = Path("engines/built/real")
CHECKPOINT = BUILT / "checkpoint"
FEATURES = (2, 15, 27)  # the published default for 30 layers
MASK = "<empty_output>"  # a token that occurs only in pretraining on code
PARD_LAYERS = 6  # copied from the target


def _target(device: str) -> tuple[Any, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32, local_files_only=True)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)


def _prompts(tokenizer: Any, seed: int, count: int) -> list[list[int]]:
    return [_chat(tokenizer, prompt) for prompt in prompts(seed, count)]


def _chat(tokenizer: Any, prompt: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _sizes(target: Any, tokenizer: Any) -> Sizes:
    return Sizes(
        features=FEATURES,
        mask=tokenizer.convert_tokens_to_ids(MASK),
        width=target.config.intermediate_size,
        heads=target.config.num_attention_heads,
        smaller=lambda: _smaller(target),
    )


def _smaller(target: Any) -> Any:
    """Return a trainable model of PARD_LAYERS of the target's layers, evenly spaced."""
    smaller = deepcopy(target).train().requires_grad_(True)
    last = len(smaller.model.layers) - 1
    chosen = [round(last * at / (PARD_LAYERS - 1)) for at in range(PARD_LAYERS)]
    smaller.model.layers = nn.ModuleList(smaller.model.layers[at] for at in chosen)
    smaller.config.num_hidden_layers = PARD_LAYERS
    return smaller


main = training(
    Course(
        open_target=_target,
        prompts=_prompts,
        sizes=_sizes,
        folder=lambda kind: BUILT / kind,
        rates={Kind.EAGLE3: 1e-3, Kind.PEAGLE: 1e-3, Kind.MTP: 6e-4, Kind.PARD: 6e-4, Kind.DFLASH: 1e-3},
        texts=4096,
        longest=192,
        together=512,
        steps=1000,
        batch=16,
        vocabulary=8192,
    )
)

if __name__ == "__main__":
    typer.run(main)
