"""Inputs of a target that reads images: the position of each token of a call, and its row of image states."""

from collections.abc import Sequence

import numpy as np

from tandemrt.engines.contract.contract import Contract
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.device.prompt_plan import Chunk
from tandemrt.runtime.device.slot_state import SlotState
from tandemrt.runtime.device.streams import upload
from tandemrt.runtime.requests.images import PromptImages
from tandemrt.runtime.requests.running import RunningRequest


class ImageInputs:
    """The bindings ``positions``, ``image_rows`` and ``image_states`` (contract.decoder). A SlotListener.

    Draft windows have no image tokens. Their positions follow from the length of the text, shifted by its images.
    """

    def __init__(self, contract: Contract, state: SlotState, *, slots: int, window: int, device: torch.device) -> None:
        states = contract["image_states"]
        self._state = state
        self._dtype = getattr(torch, states.dtype)
        self._images: dict[int, PromptImages] = {}  # by slot
        self._shift = torch.zeros(slots, dtype=torch.int64, device=device)
        self._positions = Buffer((3, slots, window + 1), torch.int64, device)
        self._no_rows = Buffer((slots, window + 1), torch.int64, device)
        self._no_states = torch.zeros(1, int(states.shape[-1]), dtype=self._dtype, device=device)

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join."""
        if (images := running.request.images) is not None:
            self._images[running.slot] = images
            self._shift[running.slot : running.slot + 1].fill_(images.shift)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._images.pop(slot, None)
        self._shift[slot].zero_()

    def of_windows(self, batch: int, query: int) -> dict[str, torch.Tensor]:
        """The bindings of draft windows [batch, query]; ``write_windows`` sets their values in each round."""
        return {
            "positions": self._positions.view(3, batch, query),
            "image_rows": self._no_rows.view(batch, query),
            "image_states": self._no_states,
        }

    def write_windows(self, batch: int, query: int) -> None:
        """Set the positions of draft windows."""
        first = self._state.view("length", batch) + self._shift[:batch]
        first.clamp_(min=0)  # of rows in prefill, which emit nothing
        positions = first[:, None] + torch.arange(query, device=first.device)
        for row in self._positions.view(3, batch, query):
            row.copy_(positions)

    def of_prompts(self, chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
        """The bindings of a prefill call over ``chunks`` of equal length; image states only of their tokens."""
        count = chunks[0].tokens
        positions, rows = np.empty((3, len(chunks), count), np.int64), np.zeros((len(chunks), count), np.int64)
        states = [self._no_states.cpu().numpy()]
        for at, chunk in enumerate(chunks):
            images = self._images.get(chunk.slot)
            known = 0 if images is None else max(0, min(chunk.end, len(images.rows)) - chunk.start)
            shift = 0 if images is None else images.shift
            positions[:, at] = np.arange(chunk.start, chunk.end) + shift
            if images is None or not known:
                continue
            part = slice(chunk.start, chunk.start + known)
            positions[:, at, :known] = images.positions[:, part]
            of_prompt = images.rows[part]
            used = of_prompt[of_prompt > 0]
            if len(used):
                assert images.states is not None, "a request joins after the tower has seen its images"
                rows[at, :known] = np.where(of_prompt > 0, of_prompt - used[0] + sum(map(len, states)), 0)
                states.append(images.states[used[0] : used[-1] + 1])
        return {
            "positions": self._uploaded(positions),
            "image_rows": self._uploaded(rows),
            "image_states": self._uploaded(np.concatenate(states)),
        }

    def _uploaded(self, values: np.ndarray) -> torch.Tensor:
        dtype = self._dtype if values.dtype.kind == "f" else torch.int64
        tensor = torch.empty(*values.shape, dtype=dtype, device=self._shift.device)
        upload(values, tensor)
        return tensor
