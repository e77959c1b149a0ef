"""Run the vision tower over images, each image once."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import lru_cache, partial
from math import isqrt
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.device.backends.base import Engine
from tandemrt.runtime.device.backends.opening import open_engines
from tandemrt.runtime.device.streams import Streams
from tandemrt.runtime.requests.images import Image, PromptImages
from tandemrt.runtime.requests.recent import Recent
from tandemrt.runtime.workers.clients import UNNAMED, Client
from tandemrt.runtime.workers.fair import FairExecutor

T = TypeVar("T")
_KEPT_BYTES = 512 << 20  # of states, those used last: a chat sends its images again with every message
_STAGED_ROWS = 256  # of states, which are copied to the host together
_WARM_TOKENS = 1024  # of the image that warms up the tower


class TowerRunner:
    """The engine ``vision`` of a bundle in a thread of its own, and the states of the images that it saw last.

    States are host tensors in ``dtype``, that of the decoder.
    """

    def __init__(self, engine: Engine, streams: Streams, dtype: torch.dtype) -> None:
        self._engine = engine
        self._streams = streams
        self._dtype = dtype
        self._width = int(engine.contract["image_states"].shape[-1])
        self._known: Recent[Future[torch.Tensor]] = Recent(_KEPT_BYTES)
        self._staging = device_of(engine.device).host_zeros(_STAGED_ROWS, self._width, dtype=dtype)
        # One thread, because the engine uses all cores, and always the same: onnxruntime prepares a GPU for each.
        self._thread = FairExecutor(1, "tandemrt-vision", most_blocked=0)
        # States are copied while the tower runs over the next image.
        self._copy_streams = Streams(engine.device)
        self._copy_thread = FairExecutor(1, "tandemrt-states", most_blocked=0)
        self._last_copy: Future[torch.Tensor] | None = None

    @classmethod
    def open(cls, bundle: Bundle, device: torch.device, threads: int | None) -> "TowerRunner":
        """Open the tower of ``bundle``, with streams of its own: graphs record what runs on those of rounds."""
        streams, dtype = Streams(device), getattr(torch, bundle.contract("target")["image_states"].dtype)
        with streams.active():
            tower = cls(open_engines(bundle, device, threads, ["vision"])["vision"], streams, dtype)
        if bundle.manifest.vision is not None and not device_of(device).on_host:
            tower.warm_up(bundle.manifest.vision, bundle.limits.length)
        return tower

    def warm_up(self, entry: VisionEntry, length: int) -> None:
        """Run the tower once: on a GPU the first run takes up to a second, and rounds of other requests would wait.

        A failure is that of the first image, too, which reports it. ``length``: see VisionEntry.most_tokens.
        """
        side = isqrt(min(_WARM_TOKENS, entry.most_tokens(length))) * entry.factor
        side = entry.side if entry.resize == "square" else max(side, entry.factor)
        image = Image.of_pixels(np.zeros((side, side, 3), np.uint8), entry)
        wait([self._thread.submit(UNNAMED, lambda: self._to_host(self._computed(image)))])

    def run_before(
        self, images: PromptImages, ready: "Sequence[Future[T]]", prepare: Callable[[], None], client: Client
    ) -> "tuple[list[Future[T]], Callable[[], None]]":
        """Return futures with the results of ``ready``, once the tower has run, and a function that starts both.

        ``prepare`` starts the work of ``ready``. A failure of the tower is one of every future.
        """
        gated: list[Future[T]] = [Future() for _ in ready]

        def start() -> None:
            try:
                run = self._thread.submit(client, self._run, images)
            except BaseException as error:  # the requests are queued: they end with it
                run = Future()
                run.set_exception(error)
            prepare()

            def abandon(_: "Future[T]") -> None:
                if all(gate.cancelled() for gate in gated):
                    run.cancel()

            for gate, of_ready in zip(gated, ready, strict=True):
                gate.add_done_callback(abandon)
                gate.add_done_callback(partial(_cancel_with, of_ready))
                run.add_done_callback(partial(_deliver_both, gate, of_ready))

        return gated, start

    def close(self) -> None:
        """Start no more work. What was not started fails with Closed."""
        self._thread.shutdown(wait=False)
        self._copy_thread.shutdown(wait=False)

    def _run(self, images: PromptImages) -> "Future[None]":
        """Run the tower over images that are not known. The result is done once ``images`` has all states."""
        states = [self._states_of(image) for image in images.images]

        def set_states() -> None:
            images.states = [of_image.result() for of_image in states]

        return self._copy_thread.submit(UNNAMED, set_states)

    def _states_of(self, image: Image) -> "Future[torch.Tensor]":
        key = image.digest, image.salt
        known = self._known.get(key)
        if known is not None and not (known.done() and known.exception()):
            return known
        states = self._computed(image)
        if self._last_copy is not None:  # the device has those of two images at most
            wait([self._last_copy])
        self._last_copy = self._copy_thread.submit(UNNAMED, self._to_host, states)
        self._last_copy.add_done_callback(_drop_frames)
        return self._known.put(key, self._last_copy, len(states) * self._staging[0].nbytes)

    def _computed(self, image: Image) -> torch.Tensor:
        """Return the states on the device, which has computed them."""
        device, dtype = self._engine.device, getattr(torch, self._engine.contract["image_states"].dtype)
        with self._streams.active():
            inputs = {name: torch.tensor(array, device=device) for name, array in tower_inputs(image).items()}
            rows = image.entry.padded_tokens(image.tokens)
            states = torch.empty(rows, self._width, dtype=dtype, device=device)
            self._engine.bind({**inputs, "image_states": states}).run()
            device_of(device).synchronize()
            return states[: image.tokens]

    def _to_host(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states in host memory, not pinned: freeing that would ask the loop's stream, which may capture.

        They come through pinned memory: tokens of rounds would wait for a copy into other memory.
        """
        device = self._engine.device
        with self._copy_streams.active():
            converted = torch.empty(*states.shape, dtype=self._dtype, device=device).copy_(states)
            parts = []
            for first in range(0, len(states), _STAGED_ROWS):
                staged = self._staging[: min(_STAGED_ROWS, len(states) - first)]
                staged.copy_(converted[first : first + len(staged)], non_blocking=True)
                device_of(device).synchronize()
                parts.append(staged.clone())
            return torch.cat(parts)


def _drop_frames(copy: "Future[torch.Tensor]") -> None:
    """Drop the traceback of a failure: its frames would keep states on the device as long as ``copy`` is kept."""
    if (error := copy.exception()) is not None:
        error.with_traceback(None)


def _cancel_with(other: "Future[Any]", done: "Future[Any]") -> None:
    if done.cancelled():
        other.cancel()


def _deliver_both(gate: "Future[T]", ready: "Future[T]", run: "Future[Future[None]]") -> None:
    """Set ``gate`` to the result of ``ready`` once that and the result of ``run`` are done; ``run`` is done."""
    states: Future[Any] = run if run.cancelled() or run.exception() else run.result()

    def deliver(ready: "Future[T]") -> None:
        if not gate.set_running_or_notify_cancel():
            return
        try:
            states.result()
            gate.set_result(ready.result())
        except BaseException as error:
            gate.set_exception(error)

    states.add_done_callback(lambda _: ready.add_done_callback(deliver))


def tower_inputs(image: Image) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of the tower (contract.vision)."""
    others = _inputs_of_shape(image.entry, image.rows, image.columns)
    more = len(others["positions"]) - len(image.patches)
    return {"pixels": np.pad(image.patches, [(0, more), (0, 0)]) if more else image.patches, **others}


@lru_cache(maxsize=8)
def _inputs_of_shape(entry: VisionEntry, rows: int, columns: int) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs but pixels; ``rows`` and ``columns`` of patches."""
    merge, tokens = entry.merge_size, rows * columns // entry.merge_size**2
    in_square = np.stack(np.divmod(np.arange(merge**2), merge), axis=-1)
    squares = np.stack(np.divmod(np.arange(tokens), columns // merge), axis=-1)
    positions = (squares[:, None] * merge + in_square).reshape(-1, 2)
    inputs: dict[str, npt.NDArray[Any]] = {"positions": positions}
    if entry.grid_side:
        inputs |= _corners(positions, (rows, columns), entry)
    if entry.window_side:
        inputs |= _windows(squares, entry)
    if not entry.padded:
        return inputs
    more = (entry.padded_tokens(tokens) - tokens) * merge**2
    padding = np.repeat(np.array([0, -1], np.float32), [len(positions), more])
    of_patches = {name: array for name, array in inputs.items() if name not in ("windows", "window_mask")}
    filled = {name: np.pad(array, [(0, more), (0, 0)][: array.ndim]) for name, array in of_patches.items()}
    return {**inputs, **filled, "padding": padding}


def _windows(squares: npt.NDArray[np.int64], entry: VisionEntry) -> dict[str, npt.NDArray[Any]]:
    """Return the patches of each window, row after row; ``squares`` [tokens, 2]: row and column of each token."""
    patches = entry.merge_size**2
    _, window_of, counts = np.unique(squares // entry.window_side, axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(window_of, kind="stable")  # tokens, by window
    starts = np.cumsum(counts) - counts
    in_window = np.arange(len(order)) - np.repeat(starts, counts)
    shape = (len(counts), entry.window_side**2, patches)
    windows, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
    windows[window_of[order], in_window] = order[:, None] * patches + np.arange(patches)
    mask[window_of[order], in_window] = 1
    places = np.empty((len(order), patches), np.int64)
    first = (window_of[order] * entry.window_side**2 + in_window) * patches
    places[order] = first[:, None] + np.arange(patches)
    flat = (len(counts), -1)
    return {"windows": windows.reshape(flat), "window_mask": mask.reshape(flat), "window_places": places.reshape(-1)}


def _corners(
    positions: npt.NDArray[np.int64], sizes: tuple[int, int], entry: VisionEntry
) -> dict[str, npt.NDArray[Any]]:
    """Return the learned positions around each patch, and their weights: bilinear, smoothed where the grid shrinks."""
    side = entry.grid_side
    (tops, down), (lefts, over) = (_around(size, side, entry.grid_corners) for size in sizes)
    rows, columns = positions.T
    corners = tops[rows][:, :, None] * side + lefts[columns][:, None]
    weights = down[rows][:, :, None] * over[columns][:, None]
    flat = (len(positions), -1)
    return {"corners": corners.reshape(flat), "corner_weights": weights.reshape(flat).astype(np.float32)}


def _around(size: int, side: int, corners: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return those of ``side`` places in a line that are around each of ``size``, and weights (VisionEntry.corners)."""
    scale = (side - 1) / max(1, size - 1) if corners else side / size
    at = np.arange(size)[:, None] * scale if corners else (np.arange(size)[:, None] + 0.5) * scale - 0.5
    reach = 1.0 if corners else max(1.0, scale)
    weights = np.maximum(0, 1 - np.abs(np.arange(side) - at) / reach)
    most = int((weights > 0).sum(axis=1).max())
    first = np.minimum((weights > 0).argmax(axis=1), side - most)
    places = first[:, None] + np.arange(most)
    near = np.take_along_axis(weights, places, axis=1)
    return places, near / near.sum(axis=1, keepdims=True)
