"""Images of a prompt: from messages to patches for the vision tower, and to positions of the decoder's tokens."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, chain
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Backend

from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest, clipped, quoted
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.requests.image_pixels import (
    Cut,
    in_patches,
    patches_in_worker,
    patches_of,
    require_pillow,
    upright,
)
from tandemrt.runtime.requests.recent import Recent

InWorker = Callable[..., Any]  # takes a description, a function and its arguments; returns the function's result
PART_TYPES = ("image_url", "image", "file")
_DETAILS = (None, "auto", "high", "original", "low")
_KEPT_BYTES = 128 << 20  # of patches, those used last: a chat sends its images again with every message
_LOW_PIXELS = 512 * 512  # what ``detail`` low means in OpenAI's API
IMAGE_PART = {"type": "image"}  # what a chat template gets


@dataclass(frozen=True, eq=False)
class Image:
    """An image, or a tile of one, in patches: uint8 [patches, colours], square by square.

    ``rows`` and ``columns``: of patches. ``before``: tokens of a prompt before it. ``digest`` names the image as the
    tower sees it. ``salt``: of the prompts that share its states.
    """

    patches: npt.NDArray[np.uint8]
    rows: int
    columns: int
    entry: VisionEntry
    before: Sequence[int] = ()
    salt: str | None = None

    @cached_property
    def digest(self) -> bytes:
        digest = sha256(f"{self.rows} {self.columns} ".encode())
        digest.update(self.patches.reshape(-1).data)
        return digest.digest()

    @classmethod
    def of_pixels(cls, colours: npt.NDArray[np.uint8], entry: VisionEntry, before: Sequence[int] = ()) -> "Image":
        """Cut ``colours`` [height, width, 3] into patches."""
        (rows, columns), patches = in_patches(colours, entry)
        return cls(patches, rows, columns, entry, before)

    @property
    def tokens(self) -> int:
        return len(self.patches) // self.entry.merge_size**2

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return self.rows // self.entry.merge_size, self.columns // self.entry.merge_size

    @property
    def prompt_tokens(self) -> list[int]:
        """The tokens of a prompt that stand for the image."""
        return self.entry.prompt_tokens(*self.grid)


class PromptImages:
    """The images of a prompt and where their tokens are.

    Attributes:
        spans: first token, end and digest of each image.
        positions: int64 [3, tokens], the position of each prompt token in time, height and width (M-RoPE).
        rows: int64 [tokens], the row of ``states`` of each prompt token; 0 for text.
        ends: int64 [tokens], the end of the image of a token that attends to later ones; else 0.
        whole: spans of images whose tokens attend to later ones, so that one call has all that are not in the cache.
        shift: what to add to the index of a token after the prompt to get its position.
        states: outputs of the tower for each image, host tensors [tokens, width] in the decoder's dtype; None until it
            has run. Row 1 is the first one of the first image.
    """

    def __init__(self, images: Sequence[Image], starts: Sequence[int], ids: Sequence[int]) -> None:
        self.images = tuple(images)
        self.positions = np.zeros((3, len(ids)), np.int64)
        self.rows = np.zeros(len(ids), np.int64)
        self.ends = np.zeros(len(ids), np.int64)
        self.spans: list[tuple[int, int, bytes]] = []
        self.whole: list[tuple[int, int]] = []
        self.states: Sequence[torch.Tensor] | None = None
        end, following, row = 0, 0, 1  # of the last image; the position and the row after it
        for start, image in zip(starts, images, strict=True):
            stop = start + len(image.prompt_tokens)
            self.spans.append((start, stop, image.digest))
            if image.entry.both_ways:
                self.whole.append((start, stop))
                self.ends[start:stop] = stop
            self.positions[:, end:start] = following + np.arange(start - end)
            following += start - end
            in_image = np.arange(image.tokens)
            self.rows[start:stop][np.array(image.prompt_tokens) == image.entry.image_token] = row + in_image
            if image.entry.position_rows:
                height, width = image.grid
                at = np.stack([0 * in_image, in_image // width, in_image % width])
                self.positions[:, start:stop] = following + at
                following += max(height, width)
            else:
                self.positions[:, start:stop] = following + np.arange(stop - start)
                following += stop - start
            end, row = stop, row + image.tokens
        self.positions[:, end:] = following + np.arange(len(ids) - end)
        self.shift = following - end

    def states_of(self, first: int, last: int) -> list[torch.Tensor]:
        """Return the states of rows ``first`` to ``last``, in parts."""
        assert self.states is not None, "a request joins after the tower has seen its images"
        parts, begin = [], 1
        for states in self.states:
            part = states[max(0, first - begin) : max(0, last + 1 - begin)]
            parts += [part] if len(part) else []
            begin += len(states)
        return parts


def expanded(
    ids: Sequence[int], images: Sequence[Sequence[Image]], entry: VisionEntry
) -> tuple[list[int], PromptImages]:
    """Write all tokens of each image, in parts, in place of its one. Raises BadRequest for another number of images."""
    places = [at for at, prompt_id in enumerate(ids) if prompt_id == entry.image_token]
    if len(places) != len(images):
        raise BadRequest(
            f"messages: the chat template must write one image token per image, it wrote {len(places)} for "
            f"{len(images)}; send images in messages whose images the template writes, mostly those of the user"
        )
    if places and places[-1] == len(ids) - 1:
        raise BadRequest("messages: text must follow an image, the chat template writes none; add a text")
    result: list[int] = []
    starts, begin = [], 0
    for place, parts_of_image in zip(places, images, strict=True):
        result += ids[begin:place]
        for part in parts_of_image:
            result += part.before
            starts.append(len(result))
            result += part.prompt_tokens
        begin = place + 1
    result += ids[begin:]
    return result, PromptImages([*chain.from_iterable(images)], starts, result)


@dataclass(frozen=True)
class ImageSource:
    """An image as a client sent it: ``data`` is a URL, bytes, a path, a PIL image or an array.

    ``low``: in few pixels (``detail`` of OpenAI's API).
    """

    data: Any
    low: bool = False

    @property
    def key(self) -> Hashable:
        """Equal for sources of one image."""
        return self.low, self.data if isinstance(self.data, str | bytes | Path) else id(self.data)


class ImageReader:
    """Takes images out of messages and turns them into patches, within the limits of ``options``."""

    def __init__(self, entry: VisionEntry, options: RuntimeOptions, tokenizer: Backend) -> None:
        self.entry = entry
        most, tiles = max(entry.min_pixels, min(entry.max_pixels, _LOW_PIXELS)), entry.tiles
        self._low = entry.model_copy(update={"max_pixels": most, "tiles": None if tiles is None else tiles.uncut})
        self._options = options
        from tandemrt.runtime.requests.media import MediaFetcher  # slow to import, and most models read no images

        self._media = MediaFetcher.of(options)
        self._tokenizer = tokenizer
        self._known: Recent[list[Image]] = Recent(_KEPT_BYTES)
        self._decoding = Lock()

    def with_image_tokens(self, text: str) -> str:
        """Return the ``text`` of a chat template with an image token for each image (VisionEntry.prompt_text)."""
        written = self.entry.template_text
        return text.replace(written, self.entry.prompt_text) if written else text

    def take(self, messages: Sequence[Any]) -> tuple[list[Any], list[ImageSource]]:
        """Return messages with ``{"type": "image"}`` in place of each image, and the images as they were sent.

        Messages that are not well-formed are returned as they are. Raises BadRequest for too many images.
        """
        sources: list[ImageSource] = []
        without = [self._without(f"messages.{at}.content", message, sources) for at, message in enumerate(messages)]
        if len(sources) > self._options.max_images:
            raise BadRequest(
                f"messages: at most {self._options.max_images} images per request (max_images), received "
                f"{len(sources)}; send fewer"
            )
        return without, sources

    def read(self, image: ImageSource, in_worker: InWorker, salt: str | None = None) -> list[Image]:
        """Return ``image`` in patches: its tiles and all of it. Bytes are decoded in a worker. Raises BadRequest.

        Only prompts of one ``salt`` share what is kept of an image, as they share cached prefixes.
        """
        require_pillow()
        from PIL import Image as Pillow

        source, entry = image.data, self._low if image.low else self.entry
        if isinstance(source, np.ndarray):
            try:
                source = Pillow.fromarray(source)
            except (TypeError, ValueError) as error:
                raise BadRequest(f"image: must be an array that Pillow takes, got {clipped(error)}") from None
        if isinstance(source, Pillow.Image):
            with self._decoding:  # prompts may share an image, and Pillow decodes it when it is used first
                source = upright(source)
            return self._cut(entry, *patches_of(source, entry), salt)
        data, most = self._file(source), self._options.max_image_pixels
        content = data.encode(errors="surrogatepass") if isinstance(data, str) else data
        key = image.low, isinstance(data, str), sha256(content).digest(), salt
        if (known := self._known.get(key)) is not None:
            return known
        (grid, shapes), colours = in_worker("decoding an image", patches_in_worker, data, most, entry)
        patches = np.frombuffer(colours, np.uint8).reshape(-1, 3 * entry.patch_size**2)
        ends = accumulate(rows * columns for rows, columns in shapes)
        cuts = list(zip(shapes, np.split(patches, list(ends)[:-1]), strict=True))
        return self._known.put(key, self._cut(entry, grid, cuts, salt), patches.nbytes)

    def _cut(self, entry: VisionEntry, grid: tuple[int, int], cuts: Sequence[Cut], salt: str | None) -> list[Image]:
        """Return images of ``cuts``, each with the text before it; ``grid``: rows and columns of tiles."""
        texts = [""] if entry.tiles is None else entry.tiles.texts(*grid)
        return [
            Image(part, rows, columns, entry, self._tokenizer.encode(text, add_special_tokens=False).ids, salt)
            for ((rows, columns), part), text in zip(cuts, texts, strict=True)
        ]

    def _without(self, place: str, message: Any, sources: list[ImageSource]) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(is_image, content)):
            return message
        parts = []
        for at, part in enumerate(content):
            if is_image(part):
                sources.append(_source(f"{place}.{at}", part))
                part = IMAGE_PART
            parts.append(part)
        return {**message, "content": parts}

    def _file(self, source: Any) -> bytes | str:
        """Return the bytes of an image, or its base64, which a worker decodes: that would stop all threads here."""
        most = self._options.max_image_bytes
        if isinstance(source, str) and self._media is not None and source.startswith(("http://", "https://")):
            return self._media.fetch(source)
        rule = f"image: at most {most} bytes (max_image_bytes)"
        if isinstance(source, str) and source.startswith("data:"):
            head, comma, encoded = source.partition(",")
            if not comma or not head.endswith(";base64"):
                raise BadRequest(f"image: a data URL must be data:image/...;base64,..., received {quoted(head)}")
            if len(encoded) * 3 // 4 > most + 3:
                raise BadRequest(f"{rule}, received {len(encoded) * 3 // 4}; resize it")
            return encoded
        if isinstance(source, PathLike):
            try:
                with Path(source).open("rb") as file:
                    source = file.read(most + 1)
            except (OSError, ValueError) as error:
                raise BadRequest(
                    f"image: {quoted(str(source))} must be a file that can be read: {clipped(error)}"
                ) from None
        if not isinstance(source, bytes | bytearray):
            raise BadRequest(
                f"image: must be a data URL (data:image/png;base64,...), received {quoted(source)}; in Python also a "
                "pathlib.Path, bytes, a PIL image or an array. Web addresses are not fetched (allowed_media_domains): "
                "send the image itself"
            )
        if len(source) > most:
            raise BadRequest(f"{rule}, received more; resize it")
        return bytes(source)


def is_image(part: Any) -> bool:
    """Whether a part of a message is an image as a client sends it."""
    return isinstance(part, Mapping) and part.get("type") in PART_TYPES


def base64_url(data: str) -> str:
    """Return the data URL of a file that a client sends as base64, or as such a URL."""
    return data if data.startswith("data:") else f"data:;base64,{data}"


def _source(place: str, part: Mapping[str, Any]) -> ImageSource:
    """Return the image of a part: {"type": "image_url", "image_url": {"url": ...}}, or a part of type image or file."""
    kind = str(part["type"])
    source, detail = part.get(kind), None
    unknown = [name for name in part if name not in ("type", kind, "prompt_cache_breakpoint")]
    if kind != "image" and isinstance(source, Mapping):
        known = ("url", "detail") if kind == "image_url" else ("file_data", "filename")
        unknown += [f"{kind}.{name}" for name, value in source.items() if name not in known and value is not None]
        detail, source = source.get("detail"), source.get(known[0])
        if detail not in _DETAILS:
            raise BadRequest(f"{place}.{kind}.detail: must be auto, high or low, received {quoted(detail)}")
    if unknown:
        raise BadRequest(
            f"{place}.{clipped(unknown[0])}: is no field of a part of type {kind} here; leave it out, and send the "
            "image itself"
        )
    if source is None or (kind != "image" and not isinstance(source, str)):
        raise BadRequest(f"{place}.{kind}: must hold an image, received {quoted(source)}")
    return ImageSource(base64_url(source) if kind == "file" else source, low=detail == "low")
