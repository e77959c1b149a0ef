"""Generate texts with a target, to train its drafts."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import save_file


class Text(NamedTuple):
    """Token ids [length], int64, of a prompt and its answer; ``begin``: index of the answer's first token."""

    ids: torch.Tensor
    begin: int


class Batch(NamedTuple):
    """Token ids [texts, length], int64, padded with -1, and the index of each answer's first token [texts]."""

    ids: torch.Tensor
    begins: torch.Tensor


@torch.inference_mode()
def write(target: Any, prompts: Sequence[Sequence[int]], *, ends: int, longest: int, together: int) -> list[Text]:
    """Generate answers with ``target``, ``together`` prompts at a time.

    Every second batch is sampled at temperature 1, the others are greedy. Answers end with the token ``ends``, or after
    ``longest`` tokens. Samples depend on the state of torch's generator.
    """
    texts = []
    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))  # similar lengths, so that padding is short
    batches = [order[at : at + together] for at in range(0, len(order), together)]
    for number, batch in enumerate(track(batches, description="the target writes")):
        width = max(len(prompts[at]) for at in batch)
        padding = torch.tensor([width - len(prompts[at]) for at in batch])
        ids = torch.tensor([[ends] * (width - len(prompts[at])) + list(prompts[at]) for at in batch])
        mask = torch.arange(width) >= padding[:, None]
        drawn = (
            {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0} if number % 2 else {"do_sample": False}
        )
        output = target.generate(
            input_ids=ids.to(target.device),
            attention_mask=mask.long().to(target.device),
            max_new_tokens=longest,
            eos_token_id=ends,
            pad_token_id=ends,
            **drawn,
        ).cpu()
        for at, row, pad in zip(batch, output, padding.tolist(), strict=True):
            over = (row[width:] == ends).nonzero()
            stop = width + int(over[0]) + 1 if len(over) else len(row)
            texts.append(Text(row[pad:stop].clone(), len(prompts[at])))
    if target.device.type == "cuda":
        torch.cuda.empty_cache()  # a cache that grows token by token fragments memory
    return texts


def origin(target: Any, prompts: Sequence[Sequence[int]], *, seed: int, **asked: int) -> dict[str, str]:
    """Return the origin of texts of ``write``, as stored with them.

    It holds digests of the target's weights and of the prompts, the ``seed`` of samples, and the sizes ``asked``.
    """
    weights, ids = hashlib.sha256(), hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode())
    for name, tensor in sorted(target.state_dict().items()):
        weights.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        weights.update(tensor.cpu().flatten().view(torch.uint8).numpy().data)
    numbers = {"count": len(prompts), "seed": seed, **asked}
    digests = {"target": weights.hexdigest(), "prompts": ids.hexdigest()}
    return {name: str(value) for name, value in numbers.items()} | digests


def kept(path: Path | None, made_of: dict[str, str], written: Callable[[], list[Text]]) -> list[Text]:
    """Return the texts in the file ``path``. If there is none, write those of ``written()`` to it first.

    ``made_of``: their origin. Raises ValueError for a file with another origin.
    """
    if path is not None and path.exists():
        with safe_open(path, "pt") as file:
            had = file.metadata() or {}
            for name, value in made_of.items():
                if had.get(name) != value:
                    raise ValueError(
                        f"the texts in {path} must be those that would be written now, with {name} {value}; got texts "
                        f"with {had.get(name)!r:.80}. Name another file, or ask for what these were made of"
                    )
            lengths, begins = (file.get_tensor(name).tolist() for name in ("lengths", "begins"))
            return [Text(*text) for text in zip(file.get_tensor("ids").split(lengths), begins, strict=True)]
    texts = written()
    if path is not None:
        lengths, begins = torch.tensor([[len(text.ids), text.begin] for text in texts]).T.contiguous()
        tensors = {"ids": torch.cat([text.ids for text in texts]), "lengths": lengths, "begins": begins}
        save_file(tensors, path, metadata=made_of)
    return texts


def texts_of(
    target: Any, prompts: Sequence[Sequence[int]], path: Path | None, *, seed: int, **asked: int
) -> list[Text]:
    """Return the texts that ``target`` generates from ``prompts``, read from the file ``path`` or stored in it.

    ``asked``: see ``write``. Raises as ``kept`` does.
    """
    made_of = {} if path is None else origin(target, prompts, seed=seed, **asked)
    return kept(path, made_of, lambda: write(target, prompts, **asked))


def batches(texts: Sequence[Text], count: int, seed: int, device: str) -> Iterator[Batch]:
    """Yield ``count`` texts of similar length at a time, forever, in another order in each pass."""
    order, rng = sorted(texts, key=lambda text: len(text.ids)), random.Random(seed)
    while True:
        chunks = [order[at : at + count] for at in range(0, len(order), count)]
        rng.shuffle(chunks)
        for chunk in chunks:
            ids = torch.nn.utils.rnn.pad_sequence([text.ids for text in chunk], batch_first=True, padding_value=-1)
            yield Batch(ids.to(device), torch.tensor([text.begin for text in chunk]).to(device))


def most_frequent(texts: Sequence[Text], count: int, vocab: int) -> tuple[torch.Tensor, float]:
    """Return the ``count`` most frequent tokens of ``vocab`` in answers, ascending, and their share of all tokens."""
    counts = torch.bincount(torch.cat([text.ids[text.begin :] for text in texts]), minlength=vocab)
    chosen = counts.argsort(descending=True, stable=True)[:count].sort().values
    return chosen, float(counts[chosen].sum() / counts.sum())
