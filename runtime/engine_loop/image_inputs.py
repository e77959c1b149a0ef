"""Inputs of a target that reads images: positions of the tokens of a call, their images, and states of these."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandemrt.engines.contract.calls import NO_PROMPTS, Packed
from tandemrt.engines.contract.contract import Contract
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.device.prompt_plan import Chunk, num_tokens
from tandemrt.runtime.device.round_shape import RoundShape
from tandemrt.runtime.device.slot_state import SlotState
from tandemrt.runtime.device.streams import upload
from tandemrt.runtime.requests.images import PromptImages
from tandemrt.runtime.requests.running import RunningRequest

_Ints = npt.NDArray[np.int64]


class ImageInputs:
    """The bindings ``image_rows`` and ``image_states``, and ``positions`` or ``image_ends`` (contract.decoder).

    A SlotListener.

    Draft windows have no image tokens. Their positions follow from the length of the text, shifted by its images.
    ``chunk``: most prompt tokens of a call that has prompts and draft windows, of a paged cache; 0: there are none.
    """

    def __init__(
        self, contract: Contract, state: SlotState, *, slots: int, window: int, chunk: int, device: torch.device
    ) -> None:
        states, tokens = contract["image_states"], slots * (window + 1) + chunk
        self._state = state
        self._dtype = getattr(torch, states.dtype)
        self._device = device
        names = {binding.name for binding in contract.inputs}
        self._has_positions, self._has_ends = "positions" in names, "image_ends" in names
        self._images: dict[int, PromptImages] = {}  # by slot
        self._shift = torch.zeros(slots, dtype=torch.int64, device=device)
        self._positions = Buffer((3, tokens), torch.int64, device)
        self._rows = Buffer((tokens,), torch.int64, device)
        self._ends = Buffer((tokens,), torch.int64, device)
        self._no_rows = Buffer((slots, window + 1), torch.int64, device)
        self._states = torch.zeros(1 + chunk, int(states.shape[-1]), dtype=self._dtype, device=device)

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join."""
        if (images := running.request.images) is not None:
            self._images[running.slot] = images
            self._shift[running.slot : running.slot + 1].fill_(images.shift)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._images.pop(slot, None)
        self._shift[slot].zero_()

    def bindings(self, tokens: Sequence[int], prompts: Packed) -> dict[str, torch.Tensor]:
        """The bindings of a call with draft windows, whose ``tokens`` have this shape (CallLayout.token_shape).

        ``write_windows`` and ``write_prompts`` set their values in each round.
        """
        without = prompts == NO_PROMPTS
        return {
            **({"positions": self._positions.view(3, *tokens)} if self._has_positions else {}),
            **({"image_ends": (self._no_rows if without else self._ends).view(*tokens)} if self._has_ends else {}),
            "image_rows": (self._no_rows if without else self._rows).view(*tokens),
            "image_states": self._states[:1] if without else self._states,
        }

    def write_windows(self, shape: RoundShape) -> None:
        """Set the positions of draft windows."""
        if not self._has_positions:
            return
        windows = shape.batch * shape.query
        first = self._state.view("length", shape.batch) + self._shift[: shape.batch]
        first.clamp_(min=0)  # of rows in prefill, which emit nothing
        positions = first[:, None] + torch.arange(shape.query, device=first.device)
        for row in self._positions.view(3, windows + shape.prompts.prompt_tokens):
            row[:windows].view(shape.batch, shape.query).copy_(positions)

    def write_prompts(self, chunks: Sequence[Chunk], windows: int, prompts: Packed) -> None:
        """Enqueue the upload for ``chunks`` of a call that has ``windows`` tokens of draft windows before them."""
        positions, rows, states = self._of_tokens(chunks)
        tokens, last = windows + prompts.prompt_tokens, windows + len(rows)
        upload(positions, self._positions.view(3, tokens)[:, windows:last])
        uploads = [(rows, self._rows)]
        if self._has_ends:
            uploads.append((np.concatenate([self._ends_in(chunk) for chunk in chunks]), self._ends))
        for values, buffer in uploads:
            in_call = buffer.view(tokens)
            in_call.zero_()
            upload(values, in_call[windows:last])
        self._write_states(states, self._states)

    def of_prompts(self, chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
        """The bindings of a prefill call over ``chunks`` of equal length, over a linear cache."""
        positions, rows, states = self._of_tokens(chunks)
        of_slots = (len(chunks), chunks[0].tokens)
        of_images = torch.zeros(
            1 + sum(map(len, states)), self._states.shape[1], dtype=self._dtype, device=self._device
        )
        self._write_states(states, of_images)
        others = {"positions": self._uploaded(positions.reshape(3, *of_slots))} if self._has_positions else {}
        if self._has_ends:
            others["image_ends"] = self._uploaded(np.stack([self._ends_in(chunk) for chunk in chunks]))
        return {**others, "image_rows": self._uploaded(rows.reshape(of_slots)), "image_states": of_images}

    def _write_states(self, parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Enqueue the copies of ``parts`` into ``target``, after its row of zeros."""
        at = 1
        for part in parts:
            target[at : at + len(part)].copy_(device_of(self._device).pinned(part), non_blocking=True)
            at += len(part)

    def _of_tokens(self, chunks: Sequence[Chunk]) -> tuple[_Ints, _Ints, list[torch.Tensor]]:
        """Return positions [3, tokens] and rows [tokens] of ``chunks``, and the states of rows 1 and up in parts."""
        count, end = num_tokens(chunks), 0
        positions, rows = np.empty((3, count), np.int64), np.zeros(count, np.int64)
        states: list[torch.Tensor] = []
        for chunk in chunks:
            images, begin = self._images.get(chunk.slot), end
            end += chunk.tokens
            shift = 0 if images is None else images.shift
            positions[:, begin:end] = np.arange(chunk.start, chunk.end) + shift
            known = 0 if images is None else max(0, min(chunk.end, len(images.rows)) - chunk.start)
            if images is None or not known:
                continue
            part = slice(chunk.start, chunk.start + known)
            positions[:, begin : begin + known] = images.positions[:, part]
            of_prompt = images.rows[part]
            used = of_prompt[of_prompt > 0]
            if len(used):
                first = 1 + sum(map(len, states))
                rows[begin : begin + known] = np.where(of_prompt > 0, of_prompt - used[0] + first, 0)
                states += images.states_of(used[0], used[-1])
        return positions, rows, states

    def _ends_in(self, chunk: Chunk) -> _Ints:
        ends, images = np.zeros(chunk.tokens, np.int64), self._images.get(chunk.slot)
        if images is not None:
            in_prompt = images.ends[chunk.start : chunk.end]
            ends[: len(in_prompt)] = in_prompt
        return ends

    def _uploaded(self, values: _Ints) -> torch.Tensor:
        tensor = torch.empty(*values.shape, dtype=torch.int64, device=self._device)
        upload(values, tensor)
        return tensor
