"""Train a draft for SmolLM2-135M-Instruct, on text that it writes itself.

    python -m tools.real.checkpoint engines/built/real/checkpoint
    python -m tools.real.train_draft eagle3

or pard, dflash, from the root of the repository; minutes on a GPU. The recipes tools/real/eagle3.toml and so on have
the draft. Prompts (tools/real/prompts.py), their order and the first weights follow from the seed; floating point does
not.
"""

from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.drafts.dflash import DFlash
from tools.drafts.eagle3 import Eagle3
from tools.drafts.fit import Draft, fit
from tools.drafts.kinds import Kind
from tools.drafts.pard import Pard
from tools.drafts.texts import batches, most_frequent, texts_of
from tools.real.prompts import prompts

BUILT = Path("engines/built/real")
FEATURES = (2, 15, 27)  # the published default for 30 layers
MASK = "<empty_output>"  # a token of its vocabulary that only pretraining on code had
RATES = {Kind.EAGLE3: 1e-3, Kind.PARD: 6e-4, Kind.DFLASH: 1e-3}
_console = Console()


def main(
    kind: Annotated[Kind, typer.Argument(help="What is trained")],
    checkpoint: Annotated[Path, typer.Option(help="What tools.real.checkpoint wrote")] = BUILT / "checkpoint",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    texts: Annotated[int, typer.Option(min=1, help="Texts that the target writes, every second batch drawn")] = 4096,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of an answer")] = 192,
    together: Annotated[int, typer.Option(min=1, help="Texts that the target writes at a time")] = 512,
    written: Annotated[
        Path | None,
        typer.Option(help="A file that keeps the texts; it is read if it is there, and refused if it has others"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Texts per step")] = 16,
    vocabulary: Annotated[int, typer.Option(min=1, help="Tokens that a head drafts, the most frequent ones")] = 8192,
    layers: Annotated[int, typer.Option(min=1, help="Layers of a PARD draft, taken from the target's")] = 6,
    seed: Annotated[int, typer.Option(help="Seed of prompts, samples and first weights")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder that receives the draft; else that of the recipe")] = None,
) -> None:
    """Train a draft."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
    target: Any = model.to(device).eval().requires_grad_(False)
    mask = tokenizer.convert_tokens_to_ids(MASK)
    asked = [_chat(tokenizer, prompt) for prompt in prompts(seed, texts)]
    ends = tokenizer.eos_token_id
    found = texts_of(target, asked, written, seed=seed, ends=ends, longest=longest, together=together)
    drafted, share = most_frequent(found, vocabulary, target.config.vocab_size)
    drafted, heads, width = drafted.to(device), target.config.num_attention_heads, target.config.intermediate_size
    draft: Draft
    match kind:
        case Kind.PARD:
            draft = Pard(target, _smaller(target, layers), tokenizer, mask=mask, seed=seed)
        case Kind.EAGLE3:
            draft = Eagle3(target, drafted, features=FEATURES, width=width).to(device)
        case Kind.DFLASH:
            draft = DFlash(target, drafted, features=FEATURES, heads=heads, width=width, mask=mask, seed=seed).to(
                device
            )
    if kind is not Kind.PARD:
        _console.print(f"{len(drafted)} tokens are drafted, which are {share:.2%} of what the target writes")
    fit(draft, batches(found, batch, seed, device), steps, RATES[kind], out or BUILT / kind)


def _chat(tokenizer: Any, prompt: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _smaller(target: Any, layers: int) -> Any:
    """A model of ``layers`` of the target's, as far from each other as they can be, that can be trained."""
    found = deepcopy(target).train().requires_grad_(True)
    last = len(found.model.layers) - 1
    chosen = [round(last * at / max(1, layers - 1)) for at in range(layers)]
    found.model.layers = nn.ModuleList(found.model.layers[at] for at in chosen)
    found.config.num_hidden_layers = layers
    return found


if __name__ == "__main__":
    typer.run(main)
