"""Check a vision tower: the states of random images against the same graph on a CPU in float32."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.dtypes import HALF
from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.engines.recipe.backends import CPU
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.check.logits import QUANTIZED_TOLERANCE
from tandemrt.runtime.check.reference import open_reference, quantizes_activations
from tandemrt.runtime.check.result import CheckResult, passed_if
from tandemrt.runtime.device.backends.base import Engine
from tandemrt.runtime.requests.images import Image
from tandemrt.runtime.requests.vision import tower_inputs

# Differences of an image's states as a share of these states, root mean squares.
_TOLERANCE, _ON_A_GPU = 1e-4, 2e-2
# A GPU multiplies in 16 bits beside a target of 16 bits. What that changes depends on the tower: scores of attention
# below 5 in random towers of Qwen3-VL, 300 in those of Gemma 3 and LFM2-VL, where queries and keys in bfloat16 move a
# score by 1. So it may be this many times what the graph in float32 changes if it rounds the factors of its matmuls.
_ROUNDINGS = 3
_SQUARES = ((1, 1), (2, 5), (6, 4))  # rows and columns of image tokens


def check_tower(bundle: Bundle, entry: VisionEntry, engine: Engine, threads: int | None) -> Iterator[CheckResult]:
    """Compare ``engine`` for images of several shapes."""
    reference = open_reference(bundle, "vision", threads, {})
    shapes = _SQUARES if entry.resize != "square" else ((entry.side // entry.factor,) * 2,)
    images = [_image(entry, rows, columns) for rows, columns in shapes]
    expected = [states_of(reference, image) for image in images]
    states = [states_of(engine, image) for image in images]
    share = _largest_share(states, expected)
    tokens, on_host = sum(image.tokens for image in images), device_of(engine.device).on_host
    tolerance = _TOLERANCE if on_host else _ON_A_GPU
    if not on_host and bundle.contract("target")["image_states"].dtype in HALF:
        rounded = open_reference(bundle, "vision", threads, {}, rounded=True)
        roundings = _largest_share([states_of(rounded, image) for image in images], expected)
        tolerance = max(tolerance, _ROUNDINGS * roundings)
    if quantizes_activations(bundle, "vision"):
        tolerance = QUANTIZED_TOLERANCE
    yield CheckResult(
        "states of images",
        f"{CPU}, float32",
        f"states of {len(images)} images ({tokens} tokens) differ by at most {share:.1e} of the states of an image "
        f"(tolerance {tolerance:.0e})",
        passed_if(share <= tolerance),
        {"tolerance": tolerance, "images": len(images), "tokens": tokens, "relative": share},
    )


def _largest_share(states: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    shares = [(new - old).norm() / old.norm() for new, old in zip(states, expected, strict=True)]
    return float(torch.stack(shares).max())  # NaN if any is


def _image(entry: VisionEntry, rows: int, columns: int) -> Image:
    size = (rows * entry.factor, columns * entry.factor, 3)
    return Image.of_pixels(np.random.default_rng(rows).integers(0, 256, size, np.uint8), entry)


def states_of(engine: Engine, image: Image) -> torch.Tensor:
    """Return what ``engine`` makes of ``image``: the states of its tokens."""
    tensors: Mapping[str, Any] = {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(engine.device)
        for name, array in tower_inputs(image).items()
    }
    width, rows = int(engine.contract["image_states"].shape[-1]), image.entry.padded_tokens(image.tokens)
    states = torch.full((rows, width), float("nan"), device=engine.device)
    engine.bind({**tensors, "image_states": states}).run()
    return states[: image.tokens].cpu()
