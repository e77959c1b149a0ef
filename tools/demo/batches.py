"""Training batches: examples as padded token ids, generated in worker processes, the same for any number of them."""

import random
from typing import Any

import torch
from torch.utils.data import Dataset

from tools.demo.corpus import Example, examples
from tools.demo.tokenizer import END, THINK_END

IGNORED = -100
"""Target of a position that does not count: the prompt, padding, and an end of thinking that was forced."""

_CHUNK = 16  # batches per item, sorted by length so that padding is short
_MULTIPLE, _SHORTEST = 64, 192  # padded lengths: few different ones, so that compiled layers are reused

# Shares of examples with thinking cut by a budget, and without thinking.
_CUT, _EMPTY = 0.07, 0.03

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids and the ids that follow them, both int64[batch, length]."""


class Batches(Dataset[list[Batch]]):
    """Item i is a list of batches that depends on seed and i alone."""

    def __init__(self, tokenizer: Any, seed: int, batch: int, steps: int) -> None:
        self._encoder, self._seed, self._batch = tokenizer.backend_tokenizer, seed, batch
        self._end = tokenizer.convert_tokens_to_ids(THINK_END)
        self._items = -(-steps // _CHUNK)

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, item: int) -> list[Batch]:
        rng = random.Random(f"batches {self._seed} {item}")
        drawn = list(examples(rng.getrandbits(62), _CHUNK * self._batch))
        rows = sorted(self._rows(drawn, rng), key=lambda row: len(row[0]))
        batches = [_padded(rows[at : at + self._batch]) for at in range(0, len(rows), self._batch)]
        rng.shuffle(batches)
        return batches

    def _rows(self, drawn: list[Example], rng: random.Random) -> list[tuple[list[int], int, int]]:
        # (ids, first position that counts, position of a forced end of thinking or -1)
        prompts = self._encode([prompt_text(example) for example in drawn])
        workings = self._encode([f"{example.thinking}\n" for example in drawn])
        records = self._encode([f"{example.record}{END}" for example in drawn])
        blank = self._encode(["\n"])[0]
        rows = []
        for prompt, working, record in zip(prompts, workings, records, strict=True):
            variant = rng.random()
            if variant < _EMPTY:
                prompt, working = [*prompt, *blank, self._end], []
                rows.append((prompt + record, len(prompt), -1))
            elif variant < _EMPTY + _CUT:
                working = working[: rng.randrange(len(working))]
                rows.append(([*prompt, *working, self._end, *record], len(prompt), len(prompt) + len(working)))
            else:
                rows.append(([*prompt, *working, self._end, *record], len(prompt), -1))
        return rows

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encoder.encode_batch_fast(texts, add_special_tokens=False)]


def prompt_text(example: Example) -> str:
    """Return the chat template's text for the example's messages, without running the template."""
    return f"<|im_start|>user\n{example.sentence}<|im_end|>\n<|im_start|>assistant\n<think>\n"


def _padded(rows: list[tuple[list[int], int, int]]) -> Batch:
    longest = max(_SHORTEST, *(len(ids) for ids, _, _ in rows))
    length = -(-longest // _MULTIPLE) * _MULTIPLE
    inputs = torch.zeros(len(rows), length, dtype=torch.int64)
    targets = torch.full((len(rows), length), IGNORED)
    for row, (ids, first, forced) in enumerate(rows):
        line = torch.tensor(ids)
        inputs[row, : len(ids)] = line
        targets[row, first - 1 : len(ids) - 1] = line[first:]
        if forced > 0:
            targets[row, forced - 1] = IGNORED
    return inputs, targets
