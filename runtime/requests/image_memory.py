"""The memory of images of requests that have not ended: pixels, and what the tower makes of them."""

import threading
import weakref

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.contract import image_token_bytes
from tandemrt.engines.validation.errors import QueueFull
from tandemrt.runtime.requests.images import PromptImages


class ImageMemory:
    """Counts bytes up to ``most``. ``token_bytes``: of the states of an image token."""

    def __init__(self, most: int, token_bytes: int) -> None:
        self._most = most
        self._token_bytes = token_bytes
        self._lock = threading.Lock()
        self._used = 0

    @classmethod
    def of(cls, bundle: Bundle, most: int) -> "ImageMemory":
        """Count images for ``bundle``, which reads them."""
        return cls(most, image_token_bytes(bundle.contract("target")))

    def hold(self, images: PromptImages) -> None:
        """Count ``images`` as long as they live. Raises QueueFull if they do not fit beside others."""
        size = sum(image.patches.nbytes + image.tokens * self._token_bytes for image in images.images)
        with self._lock:
            if self._used and self._used + size > self._most:
                raise QueueFull(
                    f"images of other requests use {self._used} of {self._most} bytes (max_image_memory), and these "
                    f"need {size}; send the request again later"
                )
            self._used += size
        weakref.finalize(images, self._release, size).atexit = False

    def _release(self, size: int) -> None:
        with self._lock:
            self._used -= size
