"""Logits of quantized checkpoints on a CUDA device against the model that the checkpoint defines."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.engine.decoding import Decoder, expected_logits, open_steps

CAPACITY = 170


def check_logits(folder: Path, model: Any, kernels: Path, dtype: str, *, near: float) -> None:
    """Compare the logits of two texts, in prompt chunks of many rows and draft windows of few.

    ``near``: the largest norm of the difference, as a share of the norm of the expected logits.
    """
    open_engine = partial(open_steps, folder=folder, device=torch.device("cuda", 0), kernels=kernels)
    texts = [torch.randint(0, 61, (120,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(2)]
    expected = [expected_logits(model, text) for text in texts]
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        decode = Decoder(folder, "paged", 2, dtype, CAPACITY, device="cuda", open_engine=open_engine)
        start = 0
        for query in (50, 3, 1, 6, 20):
            decoded = decode([text[start : start + query] for text in texts], [start, start])
            wanted = torch.stack([logits[start : start + query] for logits in expected])
            assert (decoded - wanted).norm() < near * wanted.norm()
            start += query
